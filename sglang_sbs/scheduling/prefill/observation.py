"""What one signal of a prefill instance teaches about the network: L_net, the lead, torn batches.

Each sample is of one thing, and what would poison it is left out:

- *latency*: dispatch until launch of a request that was sent to an idle instance and was in the
  pass that its own batch started. Not one that this pass left behind, and that was in a later one:
  it waited for a pass, not for the network.
- *landed*, *idled*, *left behind*: how a batch fared that was sent ahead of the end of a pass. Not
  one that was sent to an idle instance: no lead could have helped it. Not one that joined a batch
  on its way: it left later than the lead on purpose. A batch that was there for most of the time in
  which nothing ran, and did not wait for decode, did not find the instance idle: it met a pause of
  the engine.
- *torn*: what share of a batch the launch left behind that the batch itself caused on an idle
  instance. Not of a batch of one request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_sbs.scheduling.prefill.books import PrefillBooks
from sglang_sbs.scheduling.prefill.passes import Sent
from sglang_sbs.scheduling.prefill.rank import PrefillRank
from sglang_sbs.wire import EndForward

_ON_TIME_S = 0.002
"""Slack in telling a launch right after a pass from one that had to wait for a request."""


@dataclass(slots=True)
class Observation:
    """What one signal taught about the instance."""

    forward_s: float | None = None
    """T_fwd of a pass that ended, once per pass."""
    latencies_s: list[float] = field(default_factory=list)
    """L_net samples: dispatch to an idle instance until the launch."""
    requests: list[int] = field(default_factory=list)
    """Of the batches that these are of."""
    landed_s: list[float] = field(default_factory=list)
    """How long before a launch those requests were sent that were in it (not the ones above)."""
    idled_s: list[float] = field(default_factory=list)
    """How long before the end of the last pass those were sent that came after it, when nothing ran
    any more."""
    left_behind_s: list[float] = field(default_factory=list)
    """As ``landed_s`` for those that have to wait for the next pass although this one had room."""
    soonest_s: float = math.inf
    """How long before the launch the last of those was sent that are in it: L_net at most."""
    torn: float | None = None
    """Of a batch that was sent to the idle instance: the share of its requests for this rank that
    its launch left behind."""
    restarted: bool = False
    """The rank spoke with another boot id than before."""
    moved: list[str] = field(default_factory=list)
    """Requests that are believed to be at this rank now, and were dispatched to another."""


def observe_launch(
    books: PrefillBooks,
    rank: PrefillRank,
    accepted: Iterable[Sent],
    report: EndForward,
    launch_s: float,
) -> Observation:
    """Read a rank's message about the launch of a pass. ``books``: of its instance. ``rank``: whose
    message it is, with what is still in flight. ``accepted``: requests that the rank names in it,
    by the batch they were sent with. ``launch_s``: when the pass was launched."""
    learned = Observation()
    free_since_s = books.free_since_s
    rested = books.pause.rested_after(report.forward_id - 1)
    paused = not rested or _is_engines_own(report, launch_s - free_since_s)
    landed_s = []
    started = 0
    """Requests of the batch that woke the instance."""
    for sent in accepted:
        ahead_s = max(0.0, launch_s - sent.left_s)
        learned.soonest_s = min(learned.soonest_s, ahead_s)
        if sent.to_idle:
            if sent.at_s >= free_since_s:
                started += sent.requests > 1
                if not sent.has_told:
                    sent.has_told = True
                    learned.latencies_s.append(launch_s - sent.at_s)
                    learned.requests.append(sent.requests)
        elif sent.joins:
            continue
        elif launch_s > free_since_s + 1.5 * books.pause.mean_s + _ON_TIME_S and not paused:
            # The instance fell idle and launched when this one came: too late for the gapless
            # launch it was meant for.
            learned.idled_s.append(free_since_s - sent.left_s)
        else:
            landed_s.append(ahead_s)
    in_flight = list(rank.sent.values())
    if books.has_room_beside(report):
        # The last accepted are still in the handshake with decode: too late for this pass, like
        # those that are not even at the rank.
        on_time = len(landed_s) - min(report.bootstrapping_requests, len(landed_s))
        ahead = [sent for sent in in_flight if not (sent.to_idle or sent.joins)]
        learned.left_behind_s = [launch_s - sent.left_s for sent in ahead] + landed_s[on_time:]
        landed_s = landed_s[:on_time]
    learned.landed_s = landed_s
    missed = sum(
        sent.to_idle and sent.requests > 1 and free_since_s <= sent.at_s <= launch_s
        for sent in in_flight
    )
    if started or missed:
        learned.torn = missed / (started + missed)
    return learned


def _is_engines_own(report: EndForward, idle_s: float) -> bool:
    """Most of the time in which nothing ran (``idle_s``) the requests that the pass starts were
    there and did not wait for decode: no lead makes that pause shorter."""
    queued_s = [one.queued_s for one in report.started]
    if not queued_s or min(queued_s) <= 0:
        return False  # not told
    last_s = max(queued_s)
    ready_s = max([one.schedulable_s for one in report.started])
    return report.launch_s - last_s > 0.5 * idle_s > ready_s - last_s
