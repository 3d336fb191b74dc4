"""One fault of a scheduler or a front end under load, and what clients saw of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from benchmarks.chaos.ha.clients import Balanced, BalancedLoad
from benchmarks.chaos.ha.faults import HELD_S, Fault
from benchmarks.chaos.ha.places import Part, Places
from benchmarks.chaos.open_load import Fate, recovery_s
from benchmarks.chaos.run import CLIENT_TIMEOUT_S, MAX_LOAD_S, QUIET_S, SLACK, left_over
from benchmarks.demo.load import Workload

PAUSE_LIMIT_S = 3.0
PATIENCE_S = 30.0
"""Load goes on for so long if service is not as before sooner."""


class HaResult(msgspec.Struct, frozen=True):
    """The effect of one fault on clients; times in seconds."""

    fault: str
    requests: int
    """All that were sent, before the fault, during and after it."""
    lost: int
    """Never answered in full, whatever was tried."""
    longest_pause_s: float
    """The longest that a client waited for its first token, of those who had none when the fault
    came: repeats included."""
    longest_before_s: float
    repeated: int
    """Sent again to the other front end: theirs was gone. No router can do that."""
    errors: dict[str, int]
    takeover_s: float | None
    """From the fault until another scheduler schedules for a front end; ``None``: none did."""
    recovery_s: float | None
    """From the fault until requests were served as before."""
    left_over: dict[str, int]
    """Counts that the books still held when all clients had gone."""
    notes: list[str]
    passed: bool


async def run_fault(
    places: Places,
    fault: Fault,
    *,
    workload: Workload,
    tail_s: float,
    held_s: float = HELD_S,
    quiet_s: float = QUIET_S,
    patience_s: float = PATIENCE_S,
) -> HaResult:
    """Load for ``quiet_s``, the fault for ``held_s``, its end, load for ``tail_s`` more; everything
    is well again when this returns.

    Raises:
        NotReadyError, TimeoutError: it is not.
    """
    arrivals = msgspec.structs.replace(
        workload, requests=int(MAX_LOAD_S * workload.qps), content=fault.name
    ).arrivals()
    urls = [part.public for part in places.front_ends]
    async with BalancedLoad(urls, timeout_s=CLIENT_TIMEOUT_S) as load:
        load.send(arrivals)
        await asyncio.sleep(quiet_s)
        begin_s = load.elapsed_s
        struck = await fault.strike(places)
        watching = asyncio.create_task(_taken_over(places, struck.parts))
        await asyncio.sleep(held_s)
        watching.cancel()
        takeover_s = (await asyncio.gather(watching, return_exceptions=True))[0]
        await fault.heal(struck)
        healed_s = load.elapsed_s
        await places.healthy()
        struck.notes.append(f"all well {load.elapsed_s - healed_s:.1f} s after its end")
        await asyncio.sleep(tail_s)
        for _ in range(int(patience_s)):
            if _recovery_s(load.done, begin_s) is not None:
                break
            await asyncio.sleep(1.0)
        done = await load.all_answers()
    left = [await left_over(part.asked) for part in places.front_ends]
    return _result(fault, done, begin_s, _sum(left), struck.notes, takeover_s)


async def _taken_over(places: Places, struck: Sequence[Part]) -> float | None:
    """Seconds until a scheduler that is not among those schedules; ``None``: one did already."""
    begin_s, asked = time.monotonic(), 0
    while True:
        standing = await places.standing()
        if any(
            scheduler.active and scheduler.front_ends and scheduler.part not in struck
            for scheduler in standing
        ):
            return time.monotonic() - begin_s if asked else None
        asked += 1
        await asyncio.sleep(0.05)


def _result(
    fault: Fault,
    done: Sequence[Balanced],
    begin_s: float,
    left: dict[str, int],
    notes: Sequence[str],
    takeover_s: object,
) -> HaResult:
    lost = [request for request in done if not request.answered]
    pause_s = _longest_s(
        [request for request in done if not request.outcome.first_token_s < begin_s]
    )
    return HaResult(
        fault=fault.name,
        requests=len(done),
        lost=len(lost),
        longest_pause_s=pause_s,
        longest_before_s=_longest_s(
            [request for request in done if request.outcome.first_token_s < begin_s]
        ),
        repeated=sum(request.tries > 1 for request in done),
        errors=dict(Counter(_label(request) for request in lost)),
        takeover_s=takeover_s if isinstance(takeover_s, float) else None,
        recovery_s=_recovery_s(done, begin_s),
        left_over=left,
        notes=list(notes),
        passed=not lost and not left and pause_s < PAUSE_LIMIT_S,
    )


def _label(request: Balanced) -> str:
    outcome = request.outcome
    return outcome.label if outcome.fate is Fate.ERROR else f"{outcome.fate}"


def _longest_s(done: Sequence[Balanced]) -> float:
    """From being sent to the first token; infinite if there is one that has none."""
    waits = [request.outcome.sample.ttft_s for request in done]
    return max((math.inf if math.isnan(wait) else wait for wait in waits), default=0.0)


def _recovery_s(done: Sequence[Balanced], begin_s: float) -> float | None:
    limit_s = SLACK * _longest_s(
        [request for request in done if request.outcome.first_token_s < begin_s]
    )
    return recovery_s([request.outcome for request in done], begin_s, limit_s)


def _sum(books: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for book in books:
        total.update(book)
    return dict(total)
