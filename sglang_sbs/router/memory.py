"""Configures how this process returns memory to the system (Linux).

Blocks over ``_MOST_KEPT_BYTES`` are returned when freed. By default glibc raises this threshold to
the size of freed blocks, and large bodies then come from heaps that never shrink."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_MOST_KEPT_BYTES = 256 << 10
_MOST_FREE_BYTES = 8 << 20
"""Largest free space kept at the end of the heap."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt`` in glibc's ``malloc.h``."""


def give_back_large_blocks() -> None:
    """Set when glibc's ``malloc`` returns freed memory to the system; do nothing without glibc."""
    with suppress(OSError, AttributeError, TypeError):
        glibc = ctypes.CDLL(None)
        glibc.mallopt(_M_MMAP_THRESHOLD, _MOST_KEPT_BYTES)
        glibc.mallopt(_M_TRIM_THRESHOLD, _MOST_FREE_BYTES)
