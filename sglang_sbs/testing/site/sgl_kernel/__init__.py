"""Stand-in for SGLang's CUDA kernel package on a machine without CUDA.

Owns: satisfying `import sgl_kernel` / `from sgl_kernel import NAME`, which SGLang modules run at
import time whatever the device is. It must know nothing about SGLang: every name exists, and
calling one is an error that says which kernel was reached.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing_kernel(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU build of sglang-kernel")

    missing_kernel.__name__ = name
    return missing_kernel
