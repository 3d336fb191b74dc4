"""Chooses the source for the load of an instance or rank, from the messages received and their
absence.

The sources, weakest first, and the load that each one stands for:

``none``        no message yet, or none lately: own dispatches that have not ended
``interval``    the instance became silent and is served at fixed intervals (paper section 4.1.2)
``http``        answers to requests; each ends the passes presumed until then
``load_poll``   ``/v1/loads``, beside own dispatches
``endforward``  the engine's reports, plus own dispatches since the last one
"""

from __future__ import annotations

from typing import Literal

Source = Literal["none", "interval", "http", "load_poll", "endforward"]


class LoadSource:
    """Source of the load of an instance or rank now. A message from a weaker source changes nothing
    until silence ends the stronger one."""

    __slots__ = ("name", "reports")
    name: Source
    reports: bool
    """Whether the load comes from EndForward (the engine's reports)."""

    def __init__(self) -> None:
        self.forget()

    def on_report(self) -> None:
        self.name, self.reports = "endforward", True

    def on_load_poll(self) -> bool:
        """Record a load poll. Return False if EndForward, which is more precise, is the source."""
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
