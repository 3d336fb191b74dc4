"""One session of a front end with the scheduler process, as who speaks through it sees it.

:class:`~.sockets.FrontEndSocket` is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang_sbs.router.processes.messages import FromScheduler, ToScheduler


class Line(Protocol):
    """One session's socket."""

    malformed: int

    def tell(self, message: ToScheduler) -> bool:
        """False if no scheduler takes it."""

    def drain(self) -> None:
        """Take what has arrived."""

    def close(self, linger_ms: int = 0) -> None:
        """``linger_ms``: how long what was told last may take to leave."""


Connect = Callable[[Callable[[FromScheduler], None]], Line]
"""May raise; then it has left nothing open."""
