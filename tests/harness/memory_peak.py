"""Memory of a piece of work, as tracemalloc counts it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any


def peak_of(work: Callable[[], Any]) -> int:
    """Return the most bytes of Python objects that were there at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
