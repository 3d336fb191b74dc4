"""One session of a front end with the scheduler process, as who speaks through it sees it.

:class:`~sglang_sbs.router.processes.sockets.FrontEndSocket` is one.
"""

from __future__ import annotations

from typing import Protocol

from sglang_sbs.router.processes.messages import ToScheduler


class Line(Protocol):
    """One session's socket."""

    malformed: int

    def tell(self, message: ToScheduler) -> bool:
        """False if no scheduler takes it."""

    def drain(self) -> None:
        """Take what has arrived."""

    def close(self, linger_ms: int = 0) -> None:
        """``linger_ms``: how long what was told last may take to leave."""
