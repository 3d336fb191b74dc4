"""How this process gets its memory from the system (Linux).

A block over ``_MOST_KEPT_BYTES`` goes back as soon as it is free. By itself glibc raises that bound
with the blocks that are freed, and large bodies then come from heaps that never shrink."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_MOST_KEPT_BYTES = 256 << 10
_MOST_FREE_BYTES = 8 << 20
"""At the end of the heap."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt`` in glibc's ``malloc.h``."""


def give_back_large_blocks() -> None:
    """From now on; does nothing where there is no glibc."""
    with suppress(OSError, AttributeError, TypeError):
        glibc = ctypes.CDLL(None)
        glibc.mallopt(_M_MMAP_THRESHOLD, _MOST_KEPT_BYTES)
        glibc.mallopt(_M_TRIM_THRESHOLD, _MOST_FREE_BYTES)
