"""Environment and flags that make SGLang run on CPU with our plugin; SGLang is not imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tools.cpu_engine.virtual_gpu import VIRTUAL_GPU_ENV, VirtualGpuCost

# On PYTHONPATH of CPU engines only: stand-ins for GPU packages and the plugin's entry point, and
# the checkout, in which they are.
SITE_DIRECTORY = Path(__file__).resolve().parent / "site"
CHECKOUT = Path(__file__).resolve().parents[2]

CPU_ENGINE_FLAGS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    # SGLang's own warm-up request costs a forward on every instance and proves nothing here.
    "--skip-server-warmup",
    # Without AMX there is no fast bfloat16, and float32 keeps greedy output free of near ties.
    "--dtype",
    "float32",
)
CPU_PD_FLAGS = ("--disaggregation-transfer-backend", "mooncake_tcp")
# The backup of retracted requests is in memory registered with CUDA.
CPU_DECODE_FLAGS = ("--disaggregation-decode-retraction-backup", "none")


def cpu_engine_environment(
    num_ranks: int,
    virtual_gpu: VirtualGpuCost | None = None,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables to add to a CPU engine's environment.

    `num_ranks` is the engine's number of scheduler processes (`--tp`); `virtual_gpu` None means
    real compute; `inherited` is the environment they are added to.
    """
    paths = [str(SITE_DIRECTORY), str(CHECKOUT), (inherited or {}).get("PYTHONPATH")]
    cores = sorted(os.sched_getaffinity(0))
    cores_by_rank = (str(cores[rank % len(cores)]) for rank in range(num_ranks))
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "SGLANG_USE_CPU_ENGINE": "1",
        # One entry per rank; without it SGLang wants a NUMA node for each.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores_by_rank),
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        # The early send records a CUDA event.
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        "CUDA_VISIBLE_DEVICES": "",
        # Engines are forked: an OpenMP or tokenizer thread pool of the parent would not survive.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # SGLang decorates small functions with torch.compile, which needs a C++ compiler on CPU.
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if virtual_gpu is not None:
        environment[VIRTUAL_GPU_ENV] = virtual_gpu.to_json()
    return environment
