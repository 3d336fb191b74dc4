"""Turns a scheduler's events into the frames of the dashboard. Sans-I/O and bounded.

A *frame* has the current state and the news since the previous frame. A *history* has the state and
everything stored. A watcher that misses a frame restarts with a history."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from sglang_sbs.dashboard.frames import (
    Gang,
    balance_of,
    decode_shown,
    gang_shown,
    pass_shown,
    prefill_shown,
    rounded,
)
from sglang_sbs.dashboard.health.alerts import (
    MODEL_PASSES,
    Alert,
    Recent,
    find_alerts,
    stale_after_s,
)
from sglang_sbs.dashboard.health.paces import Paces
from sglang_sbs.dashboard.health.past import AlertHistory
from sglang_sbs.dashboard.health.troubles import RECENT_S, Troubles
from sglang_sbs.dashboard.health.well import is_all_well
from sglang_sbs.dashboard.passes import PassHistory, ShownPass
from sglang_sbs.dashboard.shadow import Shape
from sglang_sbs.dashboard.slowest import Slowest
from sglang_sbs.dashboard.split import TimeSplit
from sglang_sbs.dashboard.ttft import RULES, TtftComparison, percentile
from sglang_sbs.scheduling import Scheduler
from sglang_sbs.scheduling.events import (
    Command,
    Dispatch,
    Event,
    ForwardEnded,
    InstanceDown,
    InstanceUp,
    PolicySwitched,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
)
from sglang_sbs.scheduling.explained.timelines import Timeline, Timelines
from sglang_sbs.scheduling.snapshot import DecodeState, PrefillState, Snapshot
from sglang_sbs.trial.ratios import Circumstances

FRAME_VERSION = 1
PASSES_S = 30.0
HOLD_BOUNDS_S = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_GANGS = 60
_GANGS_PER_FRAME = 40
_PASSES_PER_FRAME = 2_000
_GANG_RIDS = 3
_MAX_PASSES = 20_000
_BALANCE_PASSES = 500
"""Number of recent passes used for the balance of ranks, which is computed per frame."""
_MAX_HOLDS = 2_000
_MAX_WAITING = 20_000
_SHOWN_WAITING = 8
_QUEUE_SAMPLES = 300
_BUBBLES_FROM_S = 10.0
"""Instance-seconds needed before a share of bubbles is meaningful."""
_JUDGE_S = 1.0
"""Seconds between checks of the alerts for their history."""
_TIMING = ("interval_s", "mean_forward_s", "latency_s", "lead_s")

Problems = Callable[[], Sequence[tuple[str, str]]]
Order = Callable[[], Sequence[str]]
_State = TypeVar("_State", PrefillState, DecodeState)


class DashboardRecorder:
    """Pass it every event with ``observe``, and read a ``frame`` at regular intervals."""

    def __init__(
        self,
        scheduler: Scheduler,
        now_s: float,
        timelines: Timelines,
        *,
        problems: Problems = lambda: (),
        order: Order = lambda: (),
        errors: Callable[[], int] = lambda: 0,
        alone: bool = False,
    ) -> None:
        """Create a recorder.

        - ``timelines``: the driver's, which observe each event before this recorder.
        - ``problems``: returns the problems of workers; ``order``: their URLs in display order.
        - ``errors``: returns the number of events that failed in the scheduler."""
        self._scheduler = scheduler
        self._timelines = timelines
        self._problems = problems
        self._order = order
        self._alone = alone
        self._pass_history = PassHistory()
        self._passes: deque[ShownPass] = deque(maxlen=_MAX_PASSES)
        self._gangs: deque[Gang] = deque(maxlen=_GANGS)
        self._new_gangs: list[Gang] = []
        self._left: deque[tuple[float, int, Dispatch]] = deque(maxlen=_MAX_WAITING)
        """Time, prompt tokens and dispatch of the requests that left since the last tick."""
        self._new_passes: deque[ShownPass] = deque(maxlen=_PASSES_PER_FRAME)
        self._holds: deque[tuple[float, float]] = deque(maxlen=_MAX_HOLDS)
        self._dispatched = 0
        self._troubles = Troubles(errors)
        self._waiting: dict[str, tuple[int, float]] = {}
        self._waited_s = 0.0
        self._waiting_since_s: float | None = None
        self._work: deque[tuple[int, int]] = deque([(int(now_s), 0)], maxlen=int(RECENT_S))
        """Second, and uncached prompt tokens of the requests dispatched in it."""
        self._began_s = now_s
        self._trail: deque[tuple[float, int, int]] = deque(maxlen=_QUEUE_SAMPLES)
        """Time, number of requests waiting then, and number dispatched until then."""
        self.ttft = TtftComparison()
        self.split = TimeSplit()
        self._slowest = Slowest(scheduler.why)
        self._past = AlertHistory()
        self._paces = Paces()
        self._slower: dict[str, float] = {}
        self._judged_s = -math.inf
        self._past_shown = 0
        self._on: dict[type, Callable[[Any, float], None]] = {
            ForwardEnded: self._on_report,
            RequestArrived: self._on_arrived,
            PrefillDone: self._on_prefilled,
            InstanceUp: lambda _event, now_s: self._follow(now_s),
            InstanceDown: lambda _event, now_s: self._follow(now_s),
            PolicySwitched: lambda _event, now_s: self.ttft.gain.policy_changed(now_s),
            RequestEnded: self._on_ended,
        }
        self._follow(now_s, begin=True)

    def observe(self, event: Event, commands: Sequence[Command], now_s: float) -> None:
        """Process an event and its commands. Cheap, because it runs for every event."""
        on = self._on.get(type(event))
        if on is not None:
            on(event, now_s)
        for command in commands:
            if type(command) is Dispatch:  # faster than isinstance, and most are of neither
                self._on_dispatch(command, now_s)
            elif type(command) is Refuse:
                self._waiting.pop(command.rid, None)
                self._troubles.on_refused(command.cause, now_s)
                self.ttft.on_ended(command.rid)
        if self._waiting or self._waiting_since_s is not None:
            self._clock(now_s)

    def _on_prefilled(self, event: PrefillDone, now_s: float) -> None:
        if event.aborted:
            self.ttft.on_ended(event.rid)
            return
        timeline = self._timelines.get(event.rid)
        decision = timeline.decision if timeline is not None else None
        if timeline is None or decision is None or timeline.prefilled_s != now_s:
            return  # unknown, or answered before
        place = self._scheduler.lone.place(decision.prefill, decision.prefill_rank)
        instance = self._scheduler.prefill.get(place[0])
        if instance is not None:
            tokens = max(1, timeline.prompt_tokens - decision.cached_tokens)
            passes = -(-tokens // max(1, instance.chunk_tokens))
            self.ttft.answered(now_s - timeline.arrived_s, passes, now_s)
        if self.ttft.follows(event.rid):
            ended_s = self._pass_history.last_end_s(decision.prefill, decision.prefill_rank)
            self.ttft.on_prefilled(event.rid, now_s, ended_s)

    def _on_ended(self, event: RequestEnded, _now_s: float) -> None:
        self._waiting.pop(event.rid, None)
        self.ttft.on_ended(event.rid)

    def request_over(
        self, timeline: Timeline, parts_s: Mapping[str, float] | None, now_s: float
    ) -> None:
        """Record an ended request. ``parts_s``: its TTFT by part (``PARTS``), in seconds; None if
        it got no first token."""
        decision = timeline.decision
        if decision is not None and timeline.outcome != "aborted":
            failed = timeline.outcome == "failed"
            pair = (decision.prefill, decision.decode) if failed else None
            self._troubles.on_attempt_ended(pair, now_s)
        if parts_s is not None:
            ttft_s = sum(parts_s.values())
            self.split.add(now_s, ttft_s, parts_s)
            self._slowest.add(now_s, timeline, ttft_s, parts_s)

    def _clock(self, now_s: float) -> None:
        """Add the time since the last event to the time in which requests waited."""
        if self._waiting_since_s is not None:
            self._waited_s += now_s - self._waiting_since_s
        self._waiting_since_s = now_s if self._waiting else None

    def _on_report(self, event: ForwardEnded, now_s: float) -> None:
        report = event.report
        if report.role == "prefill":
            self._clock(now_s)
            barrier = len(self._scheduler.lone.instances(event.instance)) == 1
            self._pass_history.on_report(
                event.instance, report.dp_size, report, now_s, self._waited_s, barrier=barrier
            )

    def _on_arrived(self, event: RequestArrived, now_s: float) -> None:
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.pop(next(iter(self._waiting)))
        tokens = max(1, event.prompt_tokens)
        self._waiting[event.rid] = (tokens, now_s)
        self.ttft.on_arrived(event.rid, tokens, now_s, self._scheduler.interval.latency_s)

    def _on_dispatch(self, command: Dispatch, now_s: float) -> None:
        tokens, _ = self._waiting.pop(command.rid, (0, now_s))
        self._left.append((now_s, tokens, command))
        if self.ttft.follows(command.rid):
            place = self._scheduler.lone.place(command.prefill, command.prefill_rank)
            self.ttft.on_dispatched(command.rid, *place, command.cached_tokens, now_s)

    def _take_left(self) -> None:
        """Count the dispatched requests. Only the last gangs are built, because no more are
        shown."""
        left, self._left = self._left, deque(maxlen=_MAX_WAITING)
        self._dispatched += len(left)
        self._holds.extend((now_s, command.held_s) for now_s, _, command in left)
        work = self._work
        for now_s, tokens, command in left:
            uncached = max(0, tokens - command.cached_tokens)
            second, before = work[-1]
            if second == int(now_s):
                work[-1] = second, before + uncached
            else:
                work.append((int(now_s), uncached))
        batches = dict.fromkeys(command.batch for _, _, command in left)
        shown = set([*batches][-_GANGS_PER_FRAME:])
        for now_s, tokens, command in left:
            if command.batch in shown:
                self._add_to_gang(command, tokens, now_s)
        del self._new_gangs[:-_GANGS_PER_FRAME]

    def _add_to_gang(self, command: Dispatch, tokens: int, now_s: float) -> None:
        last = self._new_gangs[-1] if self._new_gangs else None
        if last is None or last.batch != command.batch:
            last = Gang(command.batch, now_s, command.prefill, command.reason, command.held_s)
            self._new_gangs.append(last)
        last.requests += 1
        last.tokens += tokens
        last.cached_tokens += command.cached_tokens
        last.held_min_s = min(last.held_min_s, command.held_s)
        last.held_max_s = max(last.held_max_s, command.held_s)
        last.ranks[command.prefill_rank] = last.ranks.get(command.prefill_rank, 0) + 1
        if len(last.rids) < _GANG_RIDS:
            last.rids.append(command.rid)

    def tick(self, now_s: float) -> None:
        """Process recent events. Call it every ``SLICE_S`` while frames are not requested. Its cost
        is bounded."""
        self._clock(now_s)
        self._take_left()
        self._new_passes.extend(self._pass_history.take(now_s))
        if now_s >= self.ttft.rests_until_s:
            self._follow(now_s, begin=self.ttft.begins)
        self.ttft.advance(now_s)
        self._trail.append((now_s, len(self._scheduler.queue), self._dispatched))
        prefill = self._scheduler.prefill.values()
        self._troubles.look(
            ((instance.id, instance.worker, instance.watchdog.fires) for instance in prefill), now_s
        )
        self._slowest.summary(now_s)
        if now_s >= self._judged_s + _JUDGE_S:
            self._judged_s = now_s
            snapshot = self._scheduler.snapshot(now_s)
            learned = [
                state for state in snapshot.prefill if state.up and state.passes >= MODEL_PASSES
            ]
            paces_s = {state.instance: state.full_pass_s for state in learned}
            self._slower = self._paces.look(paces_s, now_s)
            self._past.update(now_s, self._alerts(snapshot, now_s)[0])

    def take_new(self, now_s: float) -> tuple[list[ShownPass], list[Gang]]:
        """Return the passes and batches since the last call, and add them to the history."""
        passes, self._new_passes = list(self._new_passes), deque(maxlen=_PASSES_PER_FRAME)
        gangs, self._new_gangs = self._new_gangs, []
        self._passes.extend(passes)
        self._gangs.extend(gangs)
        while self._passes and now_s - self._passes[0].end_s > PASSES_S:
            self._passes.popleft()
        return passes, gangs

    def frame(self, now_s: float) -> dict[str, Any]:
        """Return the state and the news since the last call, after a :meth:`tick`."""
        self.tick(now_s)
        passes, gangs = self.take_new(now_s)
        frame = self._state(self._scheduler.snapshot(now_s), now_s) | {
            "full": False,
            "passes": [pass_shown(a_pass) for a_pass in passes],
            "gangs": [gang_shown(gang) for gang in gangs],
        }
        if self._past_shown != self._past.changes:
            self._past_shown = self._past.changes
            frame["past"] = self._past.over()
        return frame

    def history(self, now_s: float) -> dict[str, Any]:
        """Return the state and everything remembered up to the last frame."""
        self._clock(now_s)
        self._take_left()
        snapshot = self._scheduler.snapshot(now_s)
        return self._state(snapshot, now_s) | {
            "full": True,
            "passes": [pass_shown(a_pass) for a_pass in self._passes],
            "gangs": [gang_shown(gang) for gang in self._gangs],
            "past": self._past.over(),
            "queue_trail": [[round(at_s, 3), requests] for at_s, requests, _ in self._trail],
        }

    def _state(self, snapshot: Snapshot, now_s: float) -> dict[str, Any]:
        alerts, recent = self._alerts(snapshot, now_s)
        config = self._scheduler.config
        return {
            "v": FRAME_VERSION,
            "now_s": round(now_s, 4),
            "alone": self._alone,
            "policy": snapshot.policy,
            "trigger": snapshot.trigger,
            "limits": {
                "queue_requests": config.max_queue_requests,
                "queue_tokens": config.max_queue_tokens,
                "n_limit": config.n_limit,
            },
            "queue": {
                "requests": snapshot.queue_requests,
                "tokens": snapshot.queue_tokens,
                "oldest_wait_s": round(snapshot.oldest_wait_s, 4),
                "in_flight": snapshot.in_flight_requests,
                "throttled": snapshot.throttled,
                "classes": snapshot.queue_classes,
                "tenants": snapshot.queue_tenants,
                "oldest": self._oldest(now_s),
            },
            "timing": {name: rounded(getattr(snapshot, name), 4) for name in _TIMING},
            "rates": {
                "batches": snapshot.batches,
                "dispatched_per_s": self._dispatch_rate(),
                "refused_in_60_s": recent.refusals,
            },
            "hold": self._hold(now_s),
            "balance": balance_of(islice(reversed(self._passes), _BALANCE_PASSES)),
            "prefill": [
                prefill_shown(
                    state,
                    self._pass_history.running(state.instance),
                    stale_after_s(snapshot, state),
                )
                for state in self._ordered(snapshot.prefill)
            ],
            "decode": [
                decode_shown(state, stale_after_s(snapshot))
                for state in self._ordered(snapshot.decode)
            ],
            "ttft": self.ttft.summary(now_s) | {"rules": RULES},
            "gain": self.gain(now_s),
            "split": self.split.summary(now_s),
            "slowest": self._slowest.summary(now_s),
            "well": msgspec.to_builtins(is_all_well(snapshot, alerts)),
            "alerts": [
                msgspec.structs.asdict(alert)
                | {"since_s": round(self._past.since_s(alert, now_s), 1)}
                for alert in alerts
            ],
        }

    def _ordered(self, instances: Sequence[_State]) -> list[_State]:
        """Sort instances in the order of the command line."""
        places = {url: place for place, url in enumerate(self._order())}
        return sorted(instances, key=lambda state: places.get(state.instance, len(places)))

    def _up(self) -> list[Any]:
        scheduler = self._scheduler
        return [each for each in scheduler.prefill.values() if scheduler.is_up(each.id)]

    def _alerts(self, snapshot: Snapshot, now_s: float) -> tuple[list[Alert], Recent]:
        scheduler, pass_s = self._scheduler, snapshot.mean_forward_s
        up = self._up()
        requests, p95_s, per_pass_s = self.ttft.slowness(now_s)
        watched_s = min(PASSES_S, now_s - self._began_s) * len(up)
        wasted_s = sum(a_pass.waste_s for a_pass in self._passes)
        recent = Recent(
            refusals=self._troubles.refusals(now_s),
            watchdog_fires=self._troubles.fires(now_s),
            problems=self._problems(),
            attempts=self._troubles.attempts(now_s),
            slower=self._slower,
            scheduler_errors=self._troubles.failed(now_s),
            alone=self._alone,
            bubbles=wasted_s / watched_s if watched_s > _BUBBLES_FROM_S else 0.0,
            ttft_requests=requests,
            ttft_p95_s=p95_s,
            ttft_split_s=self.split.summary(now_s).get("p99", {}).get("parts_s", {}),
            ttft_p95_passes=per_pass_s / pass_s if pass_s > 0 else 0.0,
            load=self._load(up, now_s),
        )
        return find_alerts(snapshot, scheduler.config, recent), recent

    def _oldest(self, now_s: float) -> list[list[Any]]:
        """Return id, prompt tokens and seconds waited of the longest waiting requests among those
        that arrived while being watched."""
        first = islice(self._waiting.items(), _SHOWN_WAITING)
        return [[rid, tokens, round(now_s - at_s, 3)] for rid, (tokens, at_s) in first]

    def _dispatch_rate(self) -> float:
        """Return the dispatched requests per second over the last ten seconds or less."""
        if not self._trail:
            return 0.0
        last_s, _, last = self._trail[-1]
        first_s, _, first = next(moment for moment in self._trail if last_s - moment[0] <= 10.0)
        return round((last - first) / (last_s - first_s), 2) if last_s > first_s else 0.0

    def _hold(self, now_s: float) -> dict[str, Any]:
        held = sorted(held_s for at_s, held_s in self._holds if now_s - at_s <= RECENT_S)
        buckets = Counter(bisect_left(HOLD_BOUNDS_S, held_s) for held_s in held)
        shown: dict[str, Any] = {
            "requests": len(held),
            "bounds_s": HOLD_BOUNDS_S,
            "counts": [buckets[bucket] for bucket in range(len(HOLD_BOUNDS_S) + 1)],
        }
        for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)) if held else ():
            shown[name] = round(percentile(held, share), 4)
        return shown

    def _follow(self, now_s: float, *, begin: bool = False) -> None:
        """Pass the running instances to the models of placement, at first with their backlog."""
        scheduler = self._scheduler
        up = self._up()
        shapes = {
            instance.id: Shape(
                instance.dp_size,
                instance.chunk_tokens,
                instance.model.predict_s,
                instance.worker,
                overlap=instance.overlap,
                pause_s=instance.pause.mean_s if instance.pause.learned else 0.0,
                formula=instance.model.formula,
            )
            for instance in up
        }
        self.ttft.follow(shapes, now_s)
        if begin:
            ranks = sum(instance.dp_size for instance in up)
            each = scheduler.queue.tokens // ranks if ranks else 0
            for instance in up:
                backlog = [rank.backlog_tokens + each for rank in instance.ranks]
                free_s = instance.passes[-1].end_s if instance.passes else now_s
                self.ttft.preload(instance.id, backlog, free_s)

    def gain(self, now_s: float) -> dict[str, Any]:
        """Return the gain of the policy in force over immediate dispatch
        (:meth:`.Gain.summary`)."""
        scheduler = self._scheduler
        up = self._up()
        about = Circumstances(
            policy=scheduler.config.policy,
            holding=getattr(scheduler.policy, "holding", scheduler.policy.holds),
            load=self._load(up, now_s),
            ranks=max([instance.dp_size for instance in up], default=1),
            overtaxed=self.ttft.overtaxed and now_s < self.ttft.rests_until_s,
        )
        return self.ttft.gain.summary(now_s, about)

    def _load(self, up: Sequence[Any], now_s: float) -> float:
        """Load in the last minute: tokens to compute as a share of what full chunks would
        compute."""
        capacity = sum(
            instance.capacity_tokens / instance.model.formula.balanced_s(instance.chunk_tokens)
            for instance in up
        )
        tokens = sum(tokens for second, tokens in self._work if now_s - second <= RECENT_S)
        return tokens / capacity / min(RECENT_S, max(1.0, now_s - self._began_s)) if up else 0.0
