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

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_sbs.scheduling.prefill.rank import Sent

_ON_TIME_S = 0.002
"""Slack in telling a launch right after a pass from one that had to wait for a request."""


class Pause(NamedTuple):
    """Before a launch, seconds of the engine's clock."""

    there_s: float
    """Since the last of its requests had come to its rank."""
    handshake_s: float
    """From then until decode had taken all of them in."""


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
    torn: float | None = None
    """Of a batch that was sent to the idle instance: the share of its requests for this rank that
    its launch left behind."""
    restarted: bool = False
    """The rank spoke with another boot id than before."""


def observe_launch(
    accepted: Iterable[Sent],
    in_flight: Iterable[Sent],
    *,
    launch_s: float,
    free_since_s: float,
    gap_s: float,
    has_room: bool,
    bootstrapping_requests: int,
    pause: Pause | None = None,
) -> Observation:
    """Read a rank's message about the launch of a pass.

    Args:
        accepted: requests that the rank names in it, by the batch they were sent with.
        in_flight: requests that are still not accepted, likewise.
        launch_s: when the pass was launched.
        free_since_s: when the pass before it ended.
        gap_s: usual pause between the two.
        has_room: the rank's chunk is not full.
        bootstrapping_requests: at the rank, not schedulable yet.
        pause: what its requests waited for; None: not told.
    """
    learned = Observation()
    in_flight = list(in_flight)
    paused = _is_engines_own(pause, launch_s - free_since_s)
    landed_s = []
    started = 0
    """Requests of the batch that woke the instance."""
    for sent in accepted:
        ahead_s = max(0.0, launch_s - sent.left_s)
        if sent.to_idle:
            if sent.at_s >= free_since_s:
                started += sent.requests > 1
                if not sent.has_told:
                    sent.has_told = True
                    learned.latencies_s.append(launch_s - sent.at_s)
                    learned.requests.append(sent.requests)
        elif sent.joins:
            continue
        elif launch_s > free_since_s + 1.5 * gap_s + _ON_TIME_S and not paused:
            # The instance fell idle and launched when this one came: too late for the gapless
            # launch it was meant for.
            learned.idled_s.append(free_since_s - sent.left_s)
        else:
            landed_s.append(ahead_s)
    if has_room:
        # The last accepted are still in the handshake with decode: too late for this pass, like
        # those that are not even at the rank.
        late = min(bootstrapping_requests, len(landed_s))
        ahead = [sent for sent in in_flight if not (sent.to_idle or sent.joins)]
        learned.left_behind_s += [launch_s - sent.left_s for sent in ahead]
        learned.left_behind_s += landed_s[len(landed_s) - late :]
        landed_s = landed_s[: len(landed_s) - late]
    learned.landed_s = landed_s
    missed = _missed(in_flight, free_since_s, launch_s)
    if started or missed:
        learned.torn = missed / (started + missed)
    return learned


def _is_engines_own(pause: Pause | None, idle_s: float) -> bool:
    """Most of the time in which nothing ran the requests were there and did not wait for decode: no
    lead makes that shorter. ``idle_s``: since the last pass."""
    return pause is not None and pause.there_s > 0.5 * idle_s > pause.handshake_s


def _missed(in_flight: Iterable[Sent], free_since_s: float, launch_s: float) -> int:
    """Requests of a batch for the idle instance that the launch left behind."""
    return sum(
        sent.to_idle and sent.requests > 1 and free_since_s <= sent.at_s <= launch_s
        for sent in in_flight
    )
