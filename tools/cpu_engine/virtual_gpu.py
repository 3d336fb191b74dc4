"""The cost model of a GPU that is not there: how long a pass takes. Without torch or SGLang, as
who plans a cluster uses it, too."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

VIRTUAL_GPU_ENV = "SGLANG_SBS_VGPU"


@dataclass(frozen=True)
class VirtualGpuCost:
    """Seconds of a forward pass as a function of what every DP rank brings to it.

    A pass is a barrier over the DP ranks of an instance. Attention runs per rank, so the fullest
    rank sets its time; the MoE layers run over the tokens of all ranks together. Hence

        prefill = base + per_max_token * max_d(tokens_d) + per_total_token * sum_d(tokens_d)
        decode  = base + per_max_request * max_d(B_d) + per_max_kv_token * max_d(K_d)

    The defaults make a 1024-token chunk per rank take 0.12 s, and a decode step 20 ms: several
    times the CPU time a small machine needs between passes, so that the passes and not the CPU set
    the pace.
    """

    prefill_base_s: float = 0.02
    prefill_per_max_token_s: float = 1e-4
    prefill_per_total_token_s: float = 0.0
    decode_base_s: float = 0.02
    decode_per_max_request_s: float = 2e-4
    decode_per_max_kv_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            wanted = "a finite number of seconds >= 0"
            if isinstance(value, bool) or not isinstance(value, int | float):
                wanted = "a number"
            elif math.isfinite(value) and value >= 0:
                continue
            raise ValueError(f"{VIRTUAL_GPU_ENV}: {name} must be {wanted}, got {value!r}")

    def prefill_s(self, tokens_per_rank: Sequence[int]) -> float:
        """Seconds of an extend pass over `tokens_per_rank` new tokens (idle ranks bring 0)."""
        return (
            self.prefill_base_s
            + self.prefill_per_max_token_s * max(tokens_per_rank, default=0)
            + self.prefill_per_total_token_s * sum(tokens_per_rank)
        )

    def decode_s(
        self, batch_per_rank: Sequence[int], kv_tokens_per_rank: Sequence[int] = ()
    ) -> float:
        """Seconds of a decode step of `batch_per_rank` requests holding `kv_tokens_per_rank`."""
        return (
            self.decode_base_s
            + self.decode_per_max_request_s * max(batch_per_rank, default=0)
            + self.decode_per_max_kv_token_s * max(kv_tokens_per_rank, default=0)
        )

    def to_json(self) -> str:
        """The value of `SGLANG_SBS_VGPU` for this model."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> VirtualGpuCost:
        """Parse a JSON object of field names to seconds; missing fields keep their default. What
        ``scripts/calibrate`` writes is taken too: there they are under ``virtual_gpu``.

        Raises: ValueError: not a JSON object, an unknown field, or a value that is not a duration.
        """
        names = [field.name for field in fields(cls)]
        known = ", ".join(names)
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{VIRTUAL_GPU_ENV} is not valid JSON ({error}): {text!r}") from error
        if not isinstance(content, dict):
            wanted = f"a JSON object with fields among {known}"
            raise ValueError(f"{VIRTUAL_GPU_ENV} must be {wanted}, got {text!r}")
        if isinstance(content.get("virtual_gpu"), dict):
            content = content["virtual_gpu"]
        for name in sorted(set(content) - set(names)):
            raise ValueError(f"{VIRTUAL_GPU_ENV}: unknown field {name!r}; known ones: {known}")
        return cls(**content)
