"""All constants of the default policy: :data:`TUNING`. The policy's other modules contain only the
numbers 0, 1 and 2. docs/lab/constants.md shows the effect of halving and doubling each measured
constant; a test compares its tables with :class:`Measured` and :class:`Memories`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """Constants that were chosen by measurement."""

    ageing: float = 5.0
    """Weight of waiting against length, without which short prompts overtake long ones for too
    long. In the order of the queue, one chunk of prompt counts as this many batch intervals of
    waiting. In pass forecasts, a request that has waited as long as its passes take adds this
    weight to its own completion, relative to the delay of others."""
    slack: float = 0.77
    """Share of a predicted amount that decisions rely on, in three places. Starts are not spaced if
    this share of the queue is more than arrives between two of them. A batch leaves early if this
    share of the queue is at least what its pass and all earlier ones take. Of the requests expected
    to arrive during a pass, this share counts as delayed if the pass becomes longer."""
    arriving_share: float = 0.6
    """When the queue is divided between a pass now and later ones, this share of the tokens or
    requests expected to arrive before a later pass starts counts for that pass."""
    worth: float = 0.95
    """The split of waiting requests found by :func:`.best_cut` replaces that of
    :func:`.fair_share`, which treats tokens as divisible, only if it costs less than this share of
    it. Pass times are not known more precisely, and a request left for a later pass lengthens the
    tail. Finishes of idle instances are compared with the same tolerance."""
    rate_passes: float = 10.0
    """Time constant, in mean pass times, of the measured arrival rate, which predicts the arrivals
    during a pass."""
    chunk_weight: float = 0.4
    """A prompt of n chunks weighs 1 + (n - 1) * ``chunk_weight`` in the cost of a placement,
    because delays of long prompts form the tail."""
    again_weight: float = 700.0
    """Cost of a second in which a rank recomputes tokens cached elsewhere: this times
    load**2 / (1 - load). The barrier makes the other ranks wait for that second. With this weight,
    little more than the optimum is recomputed near capacity."""
    split_share: float = 0.05
    """Tolerated share of split batches, per pass time by which the dispatch lead exceeds the
    latency. The further apart the requests of a batch arrive, the more it costs to wait for the
    last one."""


@dataclass(frozen=True, slots=True)
class Memories(Measured):
    """Step sizes and time constants with which the dispatch lead is learned and forgotten."""

    lead_step: float = 0.006
    """Step size of both estimates of the dispatch lead, in mean pass times."""
    split_step: float = 0.05
    """Weight of one sample in the smoothed share of a batch that an idle instance leaves behind."""
    split_forget_s: float = 60.0
    """Time constant, in seconds, with which the share that an idle instance leaves behind is
    forgotten. Otherwise a policy that avoids idle instances, because they split batches, would
    never get another sample."""
    lead_margin_s: float = 0.003
    """Least dispatch lead beyond the latency, in seconds: the resolution of the measured times."""


@dataclass(frozen=True, slots=True)
class Tuning(Memories):
    """All constants of the default policy. Those defined here, unlike the inherited ones, are
    bounds on work or waiting, or guesses."""

    # The order of the queue, and what a batch is formed of.
    most_tried: int = 2
    """Number of open passes for which a decision tries to form a batch, the most urgent first."""
    most_refused: int = 256
    """A decision stops looking through the queue after this many requests without decode room."""
    most_deferred: int = 32
    """Number of requests passed over, because other instances suit them better, at which the search
    of the queue stops. The batch then has the requests found so far."""
    most_joining: int = 64
    """While more requests than this wait, none is sent after a batch that is on its way: they were
    left for later passes on purpose."""
    most_hold_passes: float = 5.0
    """Longest hold, in mean pass times; ``--sbs-max-hold-ms`` applies if that is longer. Passes of
    large chunks take seconds."""
    retry_s: float = 0.01
    """Least time, in seconds, between an expensive decision that sent no request and the next."""
    most_divided: int = 24
    """Up to this many waiting requests, :func:`.best_cut` tries every split between the next two
    passes, at the cost of one placement on ranks each. With more, :func:`.fair_share`, which treats
    tokens as divisible, is as good."""
    most_filled: float = 1.5
    """An instance with a backlog of this many full passes gets no batch for the pass after its next
    one, which is half full already."""

    # Prompts of several chunks.
    most_planned: int = 128
    """Number of waiting requests that pass forecasts place; later ones do not matter for the next
    pass."""
    most_forecast: int = 128
    """Number of passes that forecasts predict one by one. Later passes of a prompt count as passes
    of that prompt alone: a prompt of a million tokens has a thousand of them, and each decision
    compares several places for many prompts."""
    nearest: int = 6
    """Number of instances compared for each request in pass forecasts: those that start next."""
    most_holders: int = 2
    """Number of further instances compared because they have most of a prompt cached."""
    fetch_token_s: float = 7e-6
    """Seconds per token to fetch KV from shared storage to a rank's host: a guess, because no
    report contains it."""
    load_token_s: float = 1.5e-6
    """Seconds per fetched token to load KV from host to device, in the request's first pass, while
    the whole instance waits: a guess."""

    # Prefix caches.
    least_hit_share: float = 0.02
    """No request waits for a cached prefix of less than this share of a chunk. With pages of one
    token any two prompts may begin alike."""
    most_twins: int = 4
    """Number of a batch's requests with the same first block that a further request is compared
    with."""

    # Placement on the DP ranks.
    left_out_batches: int = 3
    """A request that was left out of this many batches is placed before all others. Cost near
    saturation: docs/lab/simulations.md."""
    least_hole_share: float = 0.02
    """A prompt is split only to fill more free room of a rank than this share of a chunk."""

    # The guard (``hold_guard``).
    guard_enter_passes: float = 0.25
    """Holding stops when the dispatch lead exceeds the latency of a lone request by this much, in
    mean pass times."""
    guard_trial_passes: float = 0.06
    """Replaces ``guard_enter_passes`` while holding is on trial again."""
    guard_trial_split_passes: float = 0.03
    """Replaces ``guard_trial_passes`` for the lead's estimate from split batches alone. On a busy
    host the intake takes seconds to work off the batches of a trial, so the trial ends at the
    first split ones."""
    guard_most_load: float = 0.5
    """Load from which on requests are held even if batches do not arrive whole: with requests
    waiting at every launch, each pass would be formed a pass ahead (docs/lab/simulations.md)."""
    guard_first_s: float = 40.0
    """Seconds for which holding stays off at first; doubled after each failed trial."""
    guard_most_s: float = 160.0
    """Longest time, in seconds, for which holding stays off after failed trials."""
    guard_trial_s: float = 30.0
    """Length of a trial in seconds. It has failed if holding stops again within this time."""
    late_report_s: float = 0.05
    """Seconds after the predicted end of a pass at which a request is sent without the report of
    the end: it counts as lost."""

    # Slow networks.
    far_passes: float = 0.75
    """From this latency on, in mean pass times, requests leave when they arrive. The state at the
    end of a pass does not help a request that will be in a later one."""
    far_passes_busy: float = 0.5
    """The same from ``busy_load`` on: with requests waiting at every launch, a late one runs two
    passes later."""
    busy_load: float = 0.62
    """A value of :attr:`.OfferedLoad.load`."""

    # The load (``offered_load``) and idle instances (``idle_turns``).
    least_window_s: float = 3.0
    """Shortest time constant of the arrival rate, in seconds, so that it covers a few requests."""
    least_pass_s: float = 1e-3
    """Least steady-state pass time, in seconds: a fit may find that passes have no fixed time."""
    most_load: float = 0.95
    """Limit on the measured load. More may arrive than can be computed, but spacing and lead need a
    share below 1."""
    few_passes: int = 10
    """Least number of passes of an instance after which its forward model can show that it is
    slower than others. With fewer it counts as equal."""
    split_most_share: float = 0.25
    """If idle instances leave this share of a batch behind, starts are not spaced, because an
    instance that falls idle would gain nothing. Below it, spacing shrinks linearly."""

    # Comparing floats.
    epsilon_s: float = 1e-9
    beyond_s: float = 1e-6
    """Seconds, more than the rounding error of adding times in another order."""


TUNING = Tuning()
