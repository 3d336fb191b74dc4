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
- *split*: share of a batch of several requests that was left behind by the launch that the batch
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
"""Tolerance when telling a launch right after a pass from one that waited for a request."""


@dataclass(slots=True)
class Observation:
    """Samples from one report of the instance."""

    ended: bool = False
    """A pass ended."""
    forward_s: float | None = None
    """T_fwd of a completed pass, once per pass."""
    latencies_s: list[float] = field(default_factory=list)
    """L_net samples: dispatch to an idle instance until the launch."""
    requests: list[int] = field(default_factory=list)
    """Size of the batch each latency sample belongs to."""
    landed_s: list[float] = field(default_factory=list)
    """Times from dispatch to launch of the requests in the pass (other than those of
    ``latencies_s``)."""
    idled_s: list[float] = field(default_factory=list)
    """Times from dispatch to the end of the last pass, for requests that arrived after it while the
    instance was idle."""
    left_behind_s: list[float] = field(default_factory=list)
    """Like ``landed_s``, for requests that wait for the next pass although this one had room."""
    soonest_s: float = math.inf
    """Time from the last dispatch in the pass to its launch, an upper bound of L_net."""
    split_share: float | None = None
    """Share of a batch sent to the idle instance, among its requests for this rank, that its launch
    left behind."""
    restarted: bool = False
    """The rank reported a new boot id."""
    moved: list[str] = field(default_factory=list)
    """Requests now assumed at this rank that were dispatched to another."""


NOTHING_SEEN = Observation()
"""The samples of a report or answer without any; not to be changed."""


def observe_launch(
    passes: Passes,
    rank: PrefillRank,
    accepted: Iterable[Sent],
    report: EndForward,
    launch_s: float,
) -> Observation:
    """Read a rank's report of the launch of a pass. ``passes``: of its instance, before this one.
    ``rank``: the reporting rank, with its requests in flight. ``accepted``: the batch of each
    request that the report names. ``launch_s``: launch time of the pass."""
    learned = Observation()
    free_since_s = passes.free_since_s
    rested = passes.pause.rested_after(report.forward_id - 1)
    paused = not rested or _is_engines_own(report, launch_s - free_since_s)
    landed_s = []
    started = 0
    """Number of requests of the batch that woke the instance."""
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
