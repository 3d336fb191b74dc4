"""DWDP (`--dwdp-size`) on a machine without GPUs: DP ranks that wait for nobody.

SGLang's `DwdpManager` (`layers/moe/dwdp/dwdp_manager.py`) fetches the experts of other ranks over
NVLink while a layer computes. Here every rank gets all of them once, when the model has been
loaded. All else of DWDP is SGLang's own: no rank waits for another before or in a pass, and none
makes empty ones.
"""

from __future__ import annotations

from typing import Any

_EXPERT_WEIGHTS = ("w13_weight", "w2_weight")


def install() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    ModelRunner.maybe_init_dwdp = gather_experts


def gather_experts(runner: Any) -> None:
    """`ModelRunner.maybe_init_dwdp`: called by all ranks, once the weights are loaded."""
    import torch
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.runtime_context import get_parallel, set_global_dwdp_manager

    parallel = get_parallel()
    if runner.is_draft_worker or parallel.dwdp_size <= 1:
        return
    for layer in runner.model.modules():
        if not isinstance(layer, FusedMoE):
            continue
        weights = {}
        for name in _EXPERT_WEIGHTS:
            mine = getattr(layer, name).data
            shares = [torch.empty_like(mine) for _ in range(parallel.dwdp_size)]
            torch.distributed.all_gather(shares, mine, group=parallel.tp_group.device_group)
            weights[name] = torch.cat(shares)
        layer.bind_full_expert_weights(weights)
    set_global_dwdp_manager(NothingToFetch())


class NothingToFetch:
    """The methods of `DwdpManager` that SGLang calls around a layer and at the end."""

    def prefetch_first_layers(self) -> None:
        """Before a pass."""

    def wait_prefetch(self, layer_id: int) -> None:
        """Before a layer's experts compute."""

    def record_compute_and_prefetch_next(self, layer_id: int) -> None:
        """After them."""

    def cleanup(self) -> None:
        """Clean up at the end of the process."""
