"""The SGLang plugin of CPU engines (entry-point group `sglang.srt.plugins`, SGLang >= 0.5.11).

Found only through `tools/cpu_engine/site/` on PYTHONPATH, so an engine on GPUs never loads it.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from tools.cpu_engine.virtual_gpu import VIRTUAL_GPU_ENV, VirtualGpuCost


def register() -> None:
    """Install the CPU hooks into this engine process.

    Raises:
        ValueError: `SGLANG_SBS_VGPU` does not hold a valid cost model (SGLang logs it).
    """
    from tools.cpu_engine import idle_wait, virtual_device, whole_experts

    _fix_cpu_gaps()
    _fork_instead_of_spawn()
    _share_gloo_thread()
    cost_json = os.environ.get(VIRTUAL_GPU_ENV)
    cost = VirtualGpuCost.from_json(cost_json) if cost_json else None
    idle_wait.install(cost.decode_base_s if cost else 0.0)
    whole_experts.install()
    if "SGLANG_SBS_NODE_HOST" in os.environ:
        _share_the_machine()
    if cost:
        virtual_device.install(cost)


def _fix_cpu_gaps() -> None:
    """Three gaps of SGLang 0.5.23 on CPU without Intel AMX."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def get_cpu_graph_seq_len_fill_value(_backend: object) -> int:
        return 1

    all_to_all_single = GroupCoordinator.all_to_all_single

    def all_to_all_single_on_cpu(group: Any, output: Any, input_: Any) -> None:
        # The other collectives go round their CUDA-only custom operator on CPU; this one does not.
        if group.world_size == 1:
            all_to_all_single(group, output, input_)
        else:
            group._all_to_all_single(output, input_)

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = get_cpu_graph_seq_len_fill_value
    GroupCoordinator.all_to_all_single = all_to_all_single_on_cpu
    # Its host tensors are pinned memory, which needs CUDA.
    MooncakeKVSender.supports_host_tensor_indices = False


def _share_the_machine() -> None:
    """A node that is not the first waits for ports to be free that the first one binds: all are one
    machine here, so it must not."""
    from sglang.srt import server_args

    server_args.wait_port_available = lambda *_args, **_kwargs: True


def _fork_instead_of_spawn() -> None:
    """Fork the engine's processes: they share the imported modules' memory and start at once.

    SGLang asks for `spawn` because a CUDA context does not survive a fork; there is none here. The
    process tree stays SGLang's own, unlike with `forkserver`, and its parent-death signals with it.
    """
    set_start_method = multiprocessing.set_start_method

    def set_start_method_fork(method: str | None, force: bool = False) -> Any:
        return set_start_method("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method_fork


def _share_gloo_thread() -> None:
    """Let all Gloo groups of a process share one device, hence one thread.

    The thread of a Gloo device wakes 100 times a second. A scheduler has 17 groups, each with a
    device of its own, so 32 idle schedulers alone would use most of a core.
    """
    from torch.distributed import distributed_c10d

    class SharedDeviceGloo(distributed_c10d.ProcessGroupGloo):  # type: ignore[misc]
        device: Any = None

        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            shared = SharedDeviceGloo
            shared.device = shared.device or self.create_default_device()
            options = self._Options()
            options._devices = [shared.device]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
