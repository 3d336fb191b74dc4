"""Extracts samples of L_net, of the dispatch lead and of split batches from one report of a prefill
instance.

Each sample measures one thing, and misleading cases are excluded:

- *latency*: time from dispatch to launch of a request that was sent to an idle instance, if it is
  in the pass that its own batch started. A request in a later pass waited for a pass, not for the
  network.
- *landed*, *idled*, *left behind*: whether a request sent before the end of a pass was in time for
  the next one. Two kinds of requests are excluded: those sent to an idle instance, because no lead
  could have helped, and those that joined a batch on its way, because they left later on purpose.
  If a batch was at the engine for most of the time in which nothing ran, and did not wait for
  decode, the engine paused and the instance was not idle.
- *split*: share of a batch of several requests that missed the launch which the batch
  itself caused on an idle instance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_sbs.scheduling.prefill.passes import Passes
from sglang_sbs.scheduling.prefill.rank import PrefillRank
from sglang_sbs.scheduling.prefill.requests import Sent
from sglang_sbs.wire import EndForward

_ON_TIME_S = 0.002
"""Tolerance, in seconds, for counting a launch as right after a pass, not as waiting for a
request."""


@dataclass(slots=True)
class Observation:
    """Samples of latency, lead and forward time, and events, from one report of a prefill
    instance."""

    ended: bool = False
    """The report is the first to show the end of a pass."""
    forward_s: float | None = None
    """Forward time (T_fwd) of the ended pass, in one report per pass; otherwise None."""
    latencies_s: list[float] = field(default_factory=list)
    """Dispatch latencies (L_net): from a dispatch to an idle instance until its launch."""
    requests: list[int] = field(default_factory=list)
    """Size of the batch each latency sample belongs to."""
    landed_s: list[float] = field(default_factory=list)
    """Times from dispatch to launch, for requests in the pass that were in time for it (not those
    sent to an idle instance, or that joined a batch)."""
    idled_s: list[float] = field(default_factory=list)
    """Times from dispatch to the end of the last pass, for requests that arrived after it while the
    instance was idle."""
    left_behind_s: list[float] = field(default_factory=list)
    """Times from dispatch to this launch, for requests that wait for the next pass although this
    one had room."""
    soonest_s: float = math.inf
    """Time from the last dispatch in the pass to its launch; L_net is at most this. inf: none."""
    in_flight_s: float = 0.0
    """Longest time since the dispatch of a batch of which the rank had not accepted a request at
    this launch, the first that it misses; L_net is at least this. 0: none."""
    split_share: float | None = None
    """Share of a split batch: of this rank's requests in a batch sent to the idle instance, those
    that missed its launch, 0 to 1. None: no such batch."""
    restarted: bool = False
    """The rank reported a new boot id."""
    moved: list[str] = field(default_factory=list)
    """Ids of requests that were dispatched to another rank and are now assumed at this one."""


NOTHING_SEEN = Observation()
"""Shared result for a report or answer without samples. Do not change it."""


def observe_launch(
    passes: Passes,
    rank: PrefillRank,
    accepted: Iterable[Sent],
    report: EndForward,
    launch_s: float,
) -> Observation:
    """Return the samples in a rank's report of a launch. ``passes``: the instance's passes without
    the launched one. ``rank``: the reporting rank; accepted requests are no longer in its flight.
    ``accepted``: the batch of each request accepted since the last launch. ``launch_s``: time of
    the launch, on the scheduler's clock."""
    learned = Observation()
    free_since_s = passes.free_since_s
    rested = passes.pause.rested_after(report.forward_id - 1)
    paused = not rested or _is_engines_own(report, launch_s - free_since_s)
    landed_s = []
    started = 0
    """Accepted requests of batches of several that were sent to the idle instance."""
    for sent in accepted:
        ahead_s = max(0.0, launch_s - sent.left_s)
        learned.soonest_s = min(learned.soonest_s, ahead_s)
        if sent.to_idle:
            if sent.at_s >= free_since_s:
                started += sent.requests > 1
                if not sent.sampled:
                    sent.sampled = True
                    learned.latencies_s.append(launch_s - sent.at_s)
                    learned.requests.append(sent.requests)
        elif sent.joins:
            continue
        elif launch_s > free_since_s + 1.5 * passes.pause.mean_s + _ON_TIME_S and not paused:
            # The instance became idle and launched when this one arrived: too late for the intended
            # launch without a gap.
            learned.idled_s.append(free_since_s - sent.left_s)
        else:
            landed_s.append(ahead_s)
    in_flight = [request.sent for request in rank.flight if request.sent is not None]
    for sent in in_flight:
        if not sent.missed:  # later launches would only show how long one request takes
            sent.missed = True
            learned.in_flight_s = max(learned.in_flight_s, launch_s - sent.left_s)
    if rank.has_room_beside(report):
        # The last accepted ones are still in the handshake with decode: too late for this pass,
        # like those not at the rank yet.
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
        learned.split_share = missed / (started + missed)
    return learned


def _is_engines_own(report: EndForward, idle_s: float) -> bool:
    """Return whether only the engine caused the idle time (``idle_s``): the requests that the pass
    starts were there for most of it, and did not wait for decode. No lead can shorten such a
    pause."""
    queued_s = [started.queued_s for started in report.started]
    if not queued_s or min(queued_s) <= 0:
        return False  # not reported
    last_s = max(queued_s)
    ready_s = max([started.schedulable_s for started in report.started])
    return report.launch_s - last_s > 0.5 * idle_s > ready_s - last_s
