"""A virtual GPU under a real scheduler: no model compute, passes that take a modelled time.

It replaces the model forward and the completion event of a pass. Everything else is SGLang's:
admission, chunking, idle ranks, overlap scheduling, KV pools and their transfer.

The device is a FIFO queue, as a CUDA stream is: a pass starts when it is launched or when the one
before it ends, whichever is later. Nothing sleeps at launch, so the scheduler runs one pass ahead
as it does on a GPU and blocks only in `copy_done.synchronize()`.

Not modelled: logits. Log-probabilities are zeros and sampling parameters have no effect. Under DP
attention a decode step's KV term uses the local rank's KV tokens; the scheduler's own all-gather
then makes the slowest rank set the pace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.cpu_engine.virtual_gpu import VirtualGpuCost


@dataclass(slots=True, eq=False)
class VirtualEvent:
    """Has the interface of a device event; completes at a deadline of `time.monotonic()`."""

    deadline_s: float

    def record(self, *_args: object, **_kwargs: object) -> None:
        """A no-op: the deadline is known at launch."""

    def query(self) -> bool:
        return time.monotonic() >= self.deadline_s

    def synchronize(self) -> None:
        """Sleep until the pass has ended."""
        left_s = self.deadline_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class VirtualDevice:
    """The FIFO device of one scheduler process."""

    def __init__(self, cost: VirtualGpuCost) -> None:
        self._cost = cost
        self._free_at_s = 0.0

    def launch(self, batch: Any, launched_at_s: float) -> VirtualEvent:
        """Queue `batch` (an SGLang `ScheduleBatch`); the event of its end."""
        start_s = max(launched_at_s, self._free_at_s)
        self._free_at_s = start_s + self._duration_s(batch)
        return VirtualEvent(self._free_at_s)

    def _duration_s(self, batch: Any) -> float:
        # Under DP attention: tokens of an extend pass, or requests of a decode step, of each rank.
        per_rank = batch.global_num_tokens
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._cost.prefill_s(per_rank or [batch.extend_num_tokens or 0])
        return self._cost.decode_s(
            per_rank or [len(batch.reqs)], [sum(request.seqlen for request in batch.reqs)]
        )


def install(cost: VirtualGpuCost) -> None:
    """Register the hooks with SGLang.

    `run_batch` composes with other hooks of it in either order: only `result.copy_done` is set, and
    it is read no earlier than in `process_batch_result`.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def run_on_virtual_device(
        run_batch: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = run_batch(scheduler, batch, *args, **kwargs)
        # Decode's placeholder for requests whose KV came from a prefill instance computes nothing.
        if batch.forward_mode.is_prebuilt():
            return result
        device: VirtualDevice | None = getattr(scheduler, "_sglang_sbs_device", None)
        if device is None:
            device = scheduler._sglang_sbs_device = VirtualDevice(cost)
        result.copy_done = device.launch(batch, batch.launch_ts)
        return result

    managers, around = "sglang.srt.managers", HookType.AROUND
    forward = f"{managers}.tp_worker.TpModelWorker.forward_batch_generation"
    HookRegistry.register(forward, virtual_forward, around)
    HookRegistry.register(
        f"{managers}.scheduler.Scheduler.run_batch", run_on_virtual_device, around
    )


def virtual_forward(
    _forward: Callable[..., Any], worker: Any, batch: Any, *_args: Any, **_kwargs: Any
) -> Any:
    """Return tokens without a model, in place of `TpModelWorker.forward_batch_generation`.

    The next token is a function of the request's length alone, from the third quarter of the
    vocabulary, where no tokenizer keeps its special tokens.
    """
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult

    num_requests = len(batch.reqs)
    quarter = max(1, worker.model_runner.model_config.vocab_size // 4)
    lengths = batch.seq_lens[:num_requests].to(torch.int64)
    return GenerationBatchResult(
        logits_output=LogitsProcessorOutput(
            next_token_logits=torch.zeros((num_requests, 1)),
            **(_zero_log_probabilities(batch) if batch.return_logprob else {}),
        ),
        next_token_ids=2 * quarter + (lengths * 31) % quarter,
        can_run_cuda_graph=False,
    )


def _zero_log_probabilities(batch: Any) -> dict[str, Any]:
    """Log-probability fields of a `LogitsProcessorOutput`, of the right shapes, all zeros."""
    import torch

    top_counts = batch.top_logprobs_nums or [0] * len(batch.reqs)
    fields: dict[str, Any] = {"next_token_logprobs": torch.zeros(len(batch.reqs))}
    for field, kind in (("val", torch.float32), ("idx", torch.int64)):
        zeros = [torch.zeros(count, dtype=kind) for count in top_counts]
        fields[f"next_token_top_logprobs_{field}"] = zeros
    if batch.forward_mode.is_extend():
        spans = zip(batch.extend_lens, batch.extend_logprob_start_lens, strict=True)
        prompt_counts = [max(0, extended - start) for extended, start in spans]
        fields["input_token_logprobs"] = torch.zeros(sum(prompt_counts))
        for field, value in (("val", 0.0), ("idx", 0)):
            fields[f"input_top_logprobs_{field}"] = [
                [[value] * top_count] * prompt_count
                for top_count, prompt_count in zip(top_counts, prompt_counts, strict=True)
            ]
    return fields
