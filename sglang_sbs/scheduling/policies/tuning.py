"""Every number of the default policy: :data:`TUNING`. The policy's other modules contain only the
numbers 0, 1 and 2. docs/lab/constants.md shows the effect of halving and of doubling each measured
number. A test compares its tables with :class:`Measured` and :class:`Memories`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """Constants that were chosen by measurement."""

    ageing: float = 5.0
    """Weight of waiting against length; without it long prompts give way to short ones for too
    long. In the order of the queue, a chunk of length counts as this many batches of waiting. If
    prompts of several chunks wait, a request that has waited as long as it takes to compute has
    this weight on its own completion, compared to the delay of others."""
    slack: float = 0.77
    """Share of a prediction about the cluster that is relied on. Starts are not spaced if this
    share of the queue is more than arrives between two of them. A batch leaves early if this share
    of the queue is more than earlier passes take. Of the requests expected to arrive during a pass,
    this share counts as delayed if the pass becomes longer."""
    arriving_share: float = 0.6
    """Share of the requests expected before a later pass starts that counts as its load now."""
    worth: float = 0.95
    """A division request by request replaces the division of a fluid if it costs less than this
    share of it. Pass times are not known more precisely, and the request left for a later pass
    lengthens the tail."""
    rate_passes: float = 10.0
    """Time constant of the arrival rate, in passes, because it predicts the arrivals of one pass.
    """
    chunk_weight: float = 0.4
    """A prompt of n chunks counts as 1 + (n - 1) * this many requests, because the delays of long
    prompts form the tail."""
    again_weight: float = 700.0
    """Weight of a second in which a rank computes cached tokens again, times
    load**2 / (1 - load). The barrier makes the other ranks wait for that second. With this weight,
    little more than the optimum is computed near capacity."""
    split_share: float = 0.05
    """Share of batches that may be split, per pass time of lead beyond the latency. The further
    apart the requests of a batch arrive, the more it costs to wait for the last one."""


@dataclass(frozen=True, slots=True)
class Memories(Measured):
    """Steps and times with which the dispatch lead is learned and forgotten."""

    lead_step: float = 0.006
    """Step of both estimates of the lead, in pass times."""
    split_step: float = 0.05
    """Step of the share of a batch that an idle instance leaves behind."""
    split_forget_s: float = 60.0
    """Time constant with which that share is forgotten. Otherwise a policy that avoids idle
    instances, because they split batches, would never get another sample."""
    lead_leak_s: float = 30.0
    """Time constant with which the left-behind estimate falls back to the latency. A few minutes
    after a busy time of the host, no effect of it is left."""
    lead_margin_s: float = 0.003
    """The lead is at least this much above the latency: the resolution of the measured times."""


@dataclass(frozen=True, slots=True)
class Tuning(Memories):
    """All numbers of the policy. Those defined here bound work or waiting, or are guesses."""

    # The order of the queue, and what a batch is formed of.
    most_tried: int = 2
    """Open passes for which a decision forms a batch, the most urgent first."""
    most_refused: int = 256
    """A decision stops looking when decode has no room for this many requests of the queue."""
    most_deferred: int = 32
    """A batch is formed of the requests found so far when this many were left for other instances.
    """
    most_joining: int = 64
    """No request joins a batch on its way while more requests than this wait: those that wait were
    left for later passes on purpose."""
    most_hold_passes: float = 5.0
    """Longest hold, in mean pass times; ``--sbs-max-hold-ms`` applies if that is longer. Passes of
    large chunks take seconds."""
    retry_s: float = 0.01
    """Least time between an expensive decision that sent no request and the next decision."""
    most_divided: int = 24
    """Every division of up to this many requests is tried. Each one costs a placement, and with
    more requests in a pass the division of a fluid is as good."""
    most_filled: float = 1.5
    """An instance with this many passes of work gets no batch for the pass after its next one: that
    pass is already half full."""

    # Prompts of several chunks.
    most_planned: int = 128
    """Number of waiting requests considered; the others do not matter for the next pass."""
    nearest: int = 6
    """Instances compared for each request, those that start next."""
    most_holders: int = 2
    """Other instances compared because they have most of its prompt cached."""
    fetch_token_s: float = 7e-6
    """Time per token from shared storage to a rank: a guess, because no report contains it."""
    load_token_s: float = 1.5e-6
    """Time per fetched token from the host to the device, in the first pass of the request. The
    whole instance waits for it. This is a guess as well."""

    # Prefix caches.
    least_hit_share: float = 0.02
    """No request waits for a cached prefix of less than this share of a chunk. With pages of one
    token any two prompts may begin alike."""
    most_twins: int = 4
    """Requests of a batch that begin alike and are compared with the next one."""

    # Placement on the DP ranks.
    left_out_batches: int = 3
    """A request that was left out of this many batches is placed before the others. Its price near
    saturation: docs/lab/simulations.md."""
    least_hole_share: float = 0.02
    """A prompt is split only to fill a hole of at least this share of a chunk."""

    # The guard (``hold_guard``).
    guard_enter_passes: float = 0.25
    """Holding stops when the dispatch lead exceeds the latency of a lone request by this much, in
    mean pass times."""
    guard_trial_passes: float = 0.06
    """The same while holding is on trial."""
    guard_trial_split_passes: float = 0.03
    """The same for the estimate from split batches alone. A trial on a busy host sends batches that
    its intake takes seconds to work off, so it ends at the first ones that are split."""
    guard_most_load: float = 0.75
    """Near capacity batches fill passes, which is worth more than arriving whole."""
    guard_first_s: float = 40.0
    """Time for which holding stays off at first."""
    guard_most_s: float = 160.0
    """Longest time for which holding stays off, after failed trials."""
    guard_trial_s: float = 30.0
    """A trial has failed if holding stops again within this time."""
    late_report_s: float = 0.05
    """Longest delay of a report about the end of a pass; afterwards it counts as lost."""

    # The load (``offered_load``) and idle instances (``idle_turns``).
    least_window_s: float = 3.0
    """Shortest window of the arrival rate, so that it contains a few requests."""
    least_pass_s: float = 1e-3
    """Shortest pass: a fit may find that passes have no fixed time at all."""
    most_load: float = 0.95
    """More may arrive than can be computed. Spacing and lead need a share below 1."""
    few_passes: int = 10
    """Number of passes of an instance from which its predictions may show that it is slower than
    others; before, it counts as equal."""
    split_most_share: float = 0.25
    """If idle instances leave this share of a batch behind, starts are not spaced: an instance that
    falls idle would gain nothing."""

    # Comparing floats.
    epsilon_s: float = 1e-9
    beyond_s: float = 1e-6
    """More than the rounding error of adding times in another order."""


TUNING = Tuning()
