"""What one signal of a prefill instance teaches about latency and lead.

Owns the samples and how the launch of a pass is read for them. Must not know the books of a rank
or what the samples are used for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_sbs.scheduling.prefill_rank import Sent

_ON_TIME_S = 0.002
"""Slack in telling a launch right after a pass from one that had to wait for a request."""


@dataclass(slots=True)
class Observation:
    """What one signal taught about the instance."""

    forward_s: float | None = None
    """T_fwd of a pass that ended, once per pass."""
    latencies_s: list[float] = field(default_factory=list)
    """L_net samples: dispatch to an idle instance until the launch."""
    landed_s: list[float] = field(default_factory=list)
    """How long before a launch those requests were sent that were in it (not the ones above)."""
    idled_s: list[float] = field(default_factory=list)
    """How long before the end of the last pass those were sent that came after it, when nothing ran
    any more."""
    left_behind_s: list[float] = field(default_factory=list)
    """As ``landed_s`` for those that have to wait for the next pass although this one had room."""
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
) -> Observation:
    """Read a rank's message about the launch of a pass.

    Args:
        accepted: requests that the rank names in it.
        in_flight: requests that are still not accepted.
        launch_s: when the pass was launched.
        free_since_s: when the pass before it ended.
        gap_s: usual pause between the two.
        has_room: the rank's chunk is not full.
        bootstrapping_requests: at the rank, not schedulable yet.
    """
    learned = Observation()
    landed_s = []
    for sent in accepted:
        ahead_s = max(0.0, launch_s - sent.at_s)
        if sent.to_idle:
            learned.latencies_s.append(ahead_s)
        elif launch_s > free_since_s + 2 * gap_s + _ON_TIME_S:
            # The instance fell idle and launched when this one came: too late for the gapless
            # launch it was meant for.
            learned.idled_s.append(free_since_s - sent.at_s)
        else:
            landed_s.append(ahead_s)
    if has_room:
        # The last accepted are still in the handshake with decode: too late for this pass, like
        # those that are not even at the rank.
        late = min(bootstrapping_requests, len(landed_s))
        learned.left_behind_s += [launch_s - sent.at_s for sent in in_flight]
        learned.left_behind_s += landed_s[len(landed_s) - late :]
        landed_s = landed_s[: len(landed_s) - late]
    learned.landed_s = landed_s
    return learned
