"""Where the load of an instance or rank is known from: messages and silence in, a source out.

The sources, weakest first, and what they say of a load:

``none``        nothing received yet, or nothing lately: own dispatches that have not ended
``interval``    became silent, and is served at fixed intervals (paper section 4.1.2)
``http``        answers to requests, which end the passes presumed in between
``load_poll``   ``/v1/loads``, beside own dispatches
``endforward``  the engine's reports, corrected by own dispatches since
"""

from __future__ import annotations

from typing import Literal

Source = Literal["none", "interval", "http", "load_poll", "endforward"]


class LoadSource:
    """The source in force. A weaker message changes nothing until silence ends a stronger one."""

    __slots__ = ("name", "reports")
    name: Source
    reports: bool
    """Whether the load comes from EndForward."""

    def __init__(self) -> None:
        self.forget()

    def on_report(self) -> None:
        self.name, self.reports = "endforward", True

    def on_load_poll(self) -> bool:
        """Return whether the poll counts: reports are more precise and more recent."""
        if not self.reports:
            self.name = "load_poll"
        return not self.reports

    def on_answer(self) -> None:
        if self.name in ("none", "interval"):
            self.name = "http"

    def on_silence(self) -> None:
        self.name, self.reports = "interval", False

    def forget(self) -> None:
        self.name, self.reports = "none", False
