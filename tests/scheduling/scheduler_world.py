"""The world that :mod:`test_stateful` drives: a scheduler, ground-truth engines
(:mod:`model_engine`), and a network that loses, repeats and delays messages. Every command is
checked as it comes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import quantiles
from typing import ClassVar

import pytest
from forgetful import Forgetful
from model_engine import DecodeEngine, PrefillEngine

from sglang_sbs.scheduling import (
    Dispatch,
    Event,
    ForwardEnded,
    InstanceUp,
    PrefillDone,
    PrefixSource,
    Refuse,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
    TimerFired,
    WakeAt,
)
from sglang_sbs.wire import EndForward

MOST_REQUESTS = {"p1": 3}
"""Most requests of a rank in one pass."""
PREFILLS = {"p0": (1, 1000), "p1": (2, 500), "p2": (3, 800)}
"""dp_size and chunk_tokens; all different on purpose."""
DECODES = {"d0": (2, 6000), "d1": (3, 4000)}
"""dp_size and kv_capacity_tokens per rank."""
MAX_QUEUE = 12
N_LIMIT = 6
OUTPUT_TOKENS = 50
TIMEOUT_S = 20.0
PAGE = 50


@dataclass
class Known:
    """The test's knowledge of one request."""

    rid: str
    tokens: int
    arrived_s: float
    deadline_s: float
    dispatch: Dispatch | None = None
    delivered: bool = False
    prefilled: bool = False
    lost_at_decode: bool = False
    """Its decode instance restarted: it was there, or nobody can tell that it still comes. The
    same if the restart was before it was sent, and no report had said so."""
    state: str = "queued"  # queued, dispatched, refused, ended

    @property
    def uncached_tokens(self) -> int:
        """Tokens that its prefill rank computes; the cache has those reported to the scheduler."""
        return self.tokens - (0 if self.dispatch is None else self.dispatch.cached_tokens)


class World:
    """One scheduler, its engines and the network between them. Subclasses choose the configuration,
    and what the engines say at all."""

    config = SchedulerConfig()
    received_kinds: ClassVar[tuple[str, ...]] = ("launch", "forward", "idle", "heartbeat")
    """Kinds of messages that ever arrive; none: engines without the plugin."""
    prefix_source: ClassVar[PrefixSource] = "off"
    """Source of prefixes; unless it is off, prompts share prefixes, and ranks report their
    caches."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(self.config)
        self.twin = Forgetful(self.config)
        self.now_s = 1000.0
        self.wake_s: float | None = None
        self.shape = {**PREFILLS, **DECODES}
        if self.config.policy == "sbs" and self.config.decode_rule == "iqr":
            gangs = self.scheduler.gangs
            gangs.choose_decode = self.checked(gangs.choose_decode)
        self.requests: dict[str, Known] = {}
        self.up: set[str] = set()
        self.prefills = {
            n: PrefillEngine(n, dp, chunk, PAGE, MOST_REQUESTS.get(n, 0))
            for n, (dp, chunk) in PREFILLS.items()
        }
        self.decodes = {n: DecodeEngine(n, dp, kv) for n, (dp, kv) in DECODES.items()}
        self.ends_s: dict[str, float] = {}
        self.inbox: list[Known] = []
        self.held_back: list[ForwardEnded] = []
        self.sent_before: list[ForwardEnded] = []
        self.faulty = False
        """Something was lost or reordered since the last quiet period."""

    @property
    def live(self) -> list[Known]:
        """Neither refused nor ended."""
        return [k for k in self.requests.values() if k.state in ("queued", "dispatched")]

    # The driver ---------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        if isinstance(event, TimerFired):
            self.wake_s = None
        commands = self.scheduler.handle(event, self.now_s)
        assert self.twin.handle(event, self.now_s) == commands, "same events, other commands"
        for command in commands:
            match command:
                case WakeAt():
                    self.wake_s = command.time_s
                case Refuse():
                    known = self.requests[command.rid]
                    assert known.state == "queued", "refused twice, or after its dispatch"
                    known.state = "refused"
                    if command.cause == "deadline":
                        assert self.now_s >= known.deadline_s
                case Dispatch():
                    self.on_dispatch(command)

    def on_dispatch(self, command: Dispatch) -> None:
        known = self.requests[command.rid]
        assert known.state == "queued", "dispatched twice, or after its refusal"
        assert command.prefill in self.up
        assert command.decode in self.up
        assert 0 <= command.prefill_rank < self.shape[command.prefill][0]
        assert 0 <= command.decode_rank < self.shape[command.decode][0]
        if self.scheduler.policy.holds:
            others = [
                k.tokens + OUTPUT_TOKENS
                for k in self.requests.values()
                if k.state == "dispatched"
                and not k.lost_at_decode
                and (k.dispatch.decode, k.dispatch.decode_rank)
                == (command.decode, command.decode_rank)
            ]
            total = sum(others) + known.tokens + OUTPUT_TOKENS
            assert not others or total <= self.shape[command.decode][1], "over the KV capacity"
        assert self.now_s < known.deadline_s, "dispatched after its deadline"
        assert command.held_s == pytest.approx(self.now_s - known.arrived_s)
        rank = self.scheduler.decode[command.decode].ranks[command.decode_rank]
        boot_id = self.decodes[command.decode].boot_id
        known.lost_at_decode = rank.cursor.boot_id not in ("", boot_id)
        known.state, known.dispatch = "dispatched", command
        self.inbox.append(known)

    @staticmethod
    def checked(choose):
        """The IQR rule, with every choice compared to Algorithm 3 written down once more."""

        def checking(request, board, fits):
            chosen = choose(request, board, fits)
            loads = [(load.kv_tokens, load.running) for load in board.loads]
            if len(loads) > 1:
                q1, _, q3 = quantiles([kv for kv, _ in loads], n=4, method="inclusive")
                limit = q3 + 1.5 * (q3 - q1)
                feasible = [i for i in range(len(loads)) if fits(i)]
                safe = [i for i in feasible if loads[i][0] <= limit] or feasible
                best = min(((loads[i][1], loads[i][0]) for i in safe), default=None)
                assert best == (None if chosen is None else (loads[chosen][1], loads[chosen][0]))
            return chosen

        return checking

    def submit(self, name: str) -> None:
        self.up.add(name)
        dp_size, limit = self.shape[name]
        if name in PREFILLS:
            up = InstanceUp(
                instance=name,
                role="prefill",
                dp_size=dp_size,
                chunk_tokens=limit,
                page_size=PAGE,
                prefix_source=self.prefix_source,
                overlap=name != "p2",
                prefill_max_requests=MOST_REQUESTS.get(name, 0),
            )
        else:
            up = InstanceUp(instance=name, role="decode", dp_size=dp_size, kv_capacity_tokens=limit)
        self.tell(up)

    def say(self, messages: list[EndForward], fate: str = "deliver") -> None:
        """Messages of one engine, on the way to the scheduler."""
        for message in messages:
            event = ForwardEnded(instance=message.instance_id, report=message)
            if message.kind not in self.received_kinds:
                continue
            match fate:
                case "lose":
                    self.faulty = True
                case "delay":
                    self.faulty = True
                    self.held_back.append(event)
                case _:
                    self.tell(event)
                    if fate == "repeat":
                        self.tell(event)
                    self.sent_before.append(event)
        del self.sent_before[:-20]

    def ended(self, known: Known, outcome: str) -> None:
        known.state = "ended"
        if known in self.inbox:
            self.inbox.remove(known)
        self.ends_s.pop(known.rid, None)
        for engine in self.prefills.values():
            engine.abort(known.rid)
        for decode in self.decodes.values():
            decode.end(known.rid)
        completed = OUTPUT_TOKENS if outcome == "completed" else None
        self.tell(RequestEnded(rid=known.rid, outcome=outcome, completion_tokens=completed))
        if outcome != "completed":
            # An engine says at its next heartbeat that an aborted request left its queue.
            self.heartbeat()

    # Time ---------------------------------------------------------------------------------

    def next_s(self) -> float:
        """When the engines or the timer do something by themselves."""
        times = [*self.ends_s.values()]
        if self.wake_s is not None:
            times.append(max(self.wake_s, self.now_s))
        return min(times, default=math.inf)

    def pass_time(self, seconds: float, fate: str = "deliver") -> None:
        """Let engines and timer run; every step of the engines is reported with this fate."""
        until_s = self.now_s + seconds
        for _ in range(10_000):
            self.deliver(fate)
            due_s = self.next_s()
            if due_s > until_s:
                break
            self.now_s = max(self.now_s, due_s)
            if self.wake_s is not None and self.wake_s <= self.now_s:
                self.tell(TimerFired())
            for key, at_s in list(self.ends_s.items()):
                if at_s > self.now_s:
                    continue
                del self.ends_s[key]
                if key in self.prefills:
                    self.finish(key, fate)
                elif self.requests[key].state == "dispatched":
                    self.ended(self.requests[key], "completed")
        else:
            raise AssertionError("the scheduler never comes to rest: it keeps asking for timers")
        self.now_s = until_s

    def deliver(self, fate: str) -> None:
        """Requests reach their engines; idle engines take in what came and start a pass."""
        for engine in self.prefills.values():
            if engine.running is not None:
                continue
            for known in [k for k in self.inbox if k.dispatch.prefill == engine.name]:
                self.inbox.remove(known)
                dispatch = known.dispatch
                decode = self.decodes[dispatch.decode]
                if (
                    dispatch.prefill_rank >= engine.dp_size
                    or dispatch.decode_rank >= decode.dp_size
                ):
                    self.ended(known, "failed")
                    continue
                engine.accept(known.rid, dispatch.prefill_rank, known.uncached_tokens)
                decode.accept(known.rid, dispatch.decode_rank, known.tokens)
                known.delivered = True
                self.say([decode.message(dispatch.decode_rank)], fate)
            if engine.has_work:
                messages = engine.launch()
                self.ends_s[engine.name] = self.now_s + engine.forward_s
                self.say(messages, fate)

    def finish(self, name: str, fate: str) -> None:
        done, messages = self.prefills[name].finish()
        self.say(messages, fate)
        for rid in done:
            known = self.requests[rid]
            if known.state == "dispatched":
                known.prefilled = True
                self.tell(PrefillDone(rid=rid))
                self.ends_s[rid] = self.now_s + 0.5

    def heartbeat(self) -> None:
        for engine in self.prefills.values():
            self.say([engine.message(d, "heartbeat") for d in range(engine.dp_size)])
        for decode in self.decodes.values():
            self.say([decode.message(d) for d in range(decode.dp_size)])
