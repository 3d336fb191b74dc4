"""How this process gets its memory from the system.

Linux only. A block over ``_MOST_KEPT_BYTES`` goes back to the system as soon as it is free. By
itself glibc raises that bound with the blocks that are freed: after one large body, large ones come
from a heap that every small block left between them keeps from shrinking, one heap a thread.
"""

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
