"""The row of each run, and the file that keeps the rows while the comparison goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.compare_routers.results.measure import Answers, Engines, KvBand
from benchmarks.demo.load import Latency
from benchmarks.demo.passes import PassStatistics

_T = TypeVar("_T")
NOT_RUN = "not run, since a run before it gave no figures"
"""The error of a row that was skipped."""


class Key(msgspec.Struct, frozen=True, order=True):
    workload: str
    load: float
    """Share of the prompt tokens per second that full chunks on every rank compute."""
    seed: int
    policy: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    key: Key
    requests: int
    begun: str = ""
    """UTC, ISO 8601."""
    revision: str = ""
    """Revision of the code, where that is a git checkout."""
    qps: float = 0.0
    """Requests per second of the load."""
    wall_s: float = 0.0
    host_lag_ms: float = 0.0
    """How late a sleep of 20 ms ended in the client during the load, 99th percentile: large when
    other work had the cores, and the figures are then of that."""
    most_host_lag_ms: float = 0.0
    """The run is in no ratio with a larger host lag or a stalled loop; 0: it is in all."""
    stalled_s: float = 0.0
    """For how long in all the router's event loop stood still during the load, each time for 0.25 s
    or longer, as it says itself. Other projects' routers do not say: 0."""
    cpu_ms_per_request: float = 0.0
    """CPU time of the router's processes during the load."""
    tokens_per_s: float = 0.0
    """Tokens of prompts and answers per second of the load and prefill instance."""
    computed_over_optimum: float = 0.0
    """Prompt tokens that prefill computed over those that no request before had, of a closed loop
    with its first turns. 0: another workload."""
    warm_up_failed: int = 0
    """Requests before the load that were not answered as asked, those of a first attempt too."""
    answers: Answers | None = None
    engines: Engines | None = None
    silent: list[str] = []
    """Instances (``p1``) and ranks (``p1/0``) of which no message came during the load: its figures
    from the engines lack them."""
    error: str = ""
    """Why there are no figures: the contender does not work here."""

    @property
    def disturbed(self) -> bool:
        """Whether the host was too slow, or the router's loop stood still, so that its figures are
        in no ratio."""
        return self.most_host_lag_ms > 0 and (
            self.host_lag_ms > self.most_host_lag_ms or self.stalled_s > 0
        )

    @property
    def disturbance(self) -> str:
        """The cause of :attr:`disturbed`, in words."""
        if self.stalled_s > 0:
            return f"the router's loop stood still for {self.stalled_s:.2f} s"
        return f"host lag {self.host_lag_ms:.0f} ms"

    @property
    def to_repeat(self) -> bool:
        """Whether a comparison that goes on makes the run again. One that left requests unanswered
        stays as it is: a quieter host must not hide that."""
        return self.disturbed and self.answers is not None and not self.answers.failed


class Header(msgspec.Struct, frozen=True, kw_only=True):
    settings: dict[str, Any]
    """Settings that change a figure; a file is continued only with the same ones."""
    machine: dict[str, Any]
    begun: str
    """UTC, ISO 8601."""


class RowFile:
    """``rows.jsonl``: a header, then a row a line, each written as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, header: Header) -> Path | None:
        """A new file. Hours may be in the one that is there: it becomes ``rows.1.jsonl``, or the
        next number that is free, which is returned."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        moved = None
        if self.path.exists():
            names = (self.path.with_suffix(f".{n}{self.path.suffix}") for n in count(1))
            moved = self.path.rename(next(name for name in names if not name.exists()))
        self.path.write_bytes(_encode(header) + b"\n")
        return moved

    def add(self, row: Row) -> None:
        with self.path.open("ab") as file:
            file.write(_encode(row) + b"\n")

    def read(self) -> tuple[Header, list[Row]]:
        """A last line that was cut off is left out.

        Raises:
            ValueError: there is no such file, or it is something else.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise ValueError(f"cannot read {self.path}: {error.strerror}") from error
        try:
            header = _decode(lines[0], Header)
            rows = [_decode(line, Row) for line in lines[1:-1]]
        except msgspec.DecodeError as error:
            raise ValueError(f"{self.path} is not a file of rows: {error}") from error
        return header, rows

    def mend(self) -> None:
        """Take a cut-off last line away, so that rows can be added."""
        content = self.path.read_bytes()
        self.path.write_bytes(content[: content.rfind(b"\n") + 1])


def _decode(line: bytes, kind: type[_T]) -> _T:
    return msgspec.convert(_with_nan(msgspec.json.decode(line)), kind, strict=False)


def _encode(value: Header | Row) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(value))


_FLOAT_FIELDS = {
    name
    for kind in (Latency, PassStatistics, Engines, KvBand, Answers)
    for name, annotation in kind.__annotations__.items()
    if annotation in ("float", float)
}


def _with_nan(value: Any) -> Any:
    """JSON has no NaN: msgspec writes null, which is read back where a number belongs."""
    if isinstance(value, dict):
        return {
            key: math.nan if part is None and key in _FLOAT_FIELDS else _with_nan(part)
            for key, part in value.items()
        }
    return value


def figures(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with figures, one per key: the last, where a run was made again."""
    return list({row.key: row for row in rows if row.answers is not None}.values())
