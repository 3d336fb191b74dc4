"""Whatever is said in the name of one engine, the others serve throughout; and once it speaks the
truth again, or nothing more is said, it serves within a watchdog.

The real listener, registry and scheduler, with ground-truth engines (:mod:`model_engine`) and a
clock of their own. The engine does its work all the time: what is reported of it is forged, or
a fault of its plugin.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_engine import DecodeEngine, PrefillEngine

from sglang_sbs.router.signals.endforward_listener import EndForwardListener
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import SbsBlock, WorkerInfo
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.scheduling import (
    Dispatch,
    Event,
    LoadPolled,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
    TimerFired,
    WakeAt,
)
from sglang_sbs.scheduling.prefill.instance import LOST_S
from sglang_sbs.scheduling.received.report_cursor import RESUME_S, SILENT_S
from sglang_sbs.wire import EndForward, encode_endforward

P0, P1, D0, D1 = "http://p0:1", "http://p1:1", "http://d0:1", "http://d1:1"
DP, CHUNK, CAPACITY, MAX_RUNNING = 2, 1000, 20_000, 8
PROMPT, OUTPUT = 300, 50
PROMPTLY_S = 3.0
"""Longest hold of a request (2 s) and a few passes."""
HUGE = 1 << 40
After = Literal["truth", "silence", "polls"]


class Cluster:
    """Two prefill and two decode engines, of which one is lied about."""

    def __init__(
        self, liar: str, *, shows_boot: bool, limits: bool, plugin: bool, trigger: str
    ) -> None:
        """``shows_boot``: ``/server_info`` has the boot id; ``limits``: and how much an engine
        holds. ``plugin``: the liar sends reports of its own, too."""
        self.now_s = 100.0
        self.shows_boot, self.limits = shows_boot, limits
        config = SchedulerConfig(trigger=trigger, t_default_s=0.1, default_output_tokens=OUTPUT)
        self.scheduler = Scheduler(config)
        self.registry = Registry(
            WorkerEvents(
                self.tell,
                doubted=lambda worker: self.at(0.1, lambda: self.describe(worker)),
                silenced=self.lose,
            ),
            clock=lambda: self.now_s,
        )
        self.listener = EndForwardListener(self.registry, self.tell, lambda rid, role: None)
        self.prefills = {name: PrefillEngine(name, DP, CHUNK) for name in (P0, P1)}
        self.decodes = {name: DecodeEngine(name, DP) for name in (D0, D1)}
        self.mute: set[str] = set() if plugin else {liar}
        self.polled: set[str] = set()
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.wake_s: float | None = None
        self.left: dict[str, Dispatch] = {}
        self.left_s: dict[str, float] = {}
        self.ended: set[str] = set()
        self.waiting_at: dict[str, list[str]] = {P0: [], P1: []}
        for role, names in (("prefill", (P0, P1)), ("decode", (D0, D1))):
            for name in names:
                self.describe(self.registry.add(name, role))
        self.every(1.0, self.beat)
        self.every(1.0, self.registry.tick)
        self.every(0.25, self.poll)

    def describe(self, worker: Worker) -> None:
        info = WorkerInfo(
            dp_size=DP,
            chunk_tokens=CHUNK,
            kv_capacity_tokens=CAPACITY if self.limits else 0,
            max_running_requests=MAX_RUNNING if self.limits else 0,
            sbs=SbsBlock(boot_id=f"{worker.url}-1") if self.shows_boot else None,
        )
        self.registry.described(worker, info)
        self.registry.set_healthy(worker, True)
        self.registry.refresh(worker)

    # Time ---------------------------------------------------------------------------------

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.due, (self.now_s + seconds, next(self.numbers), act))

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self.at(seconds, again)

        self.at(seconds, again)

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        for _ in range(100_000):
            wake_s = until_s if self.wake_s is None else max(self.now_s, self.wake_s)
            next_s = min(wake_s, self.due[0][0])
            if next_s > until_s:
                break
            self.now_s = max(self.now_s, next_s)
            if self.due[0][0] <= self.now_s:
                heapq.heappop(self.due)[2]()
            elif self.wake_s is not None and self.wake_s <= self.now_s:
                self.wake_s = None
                self.tell(TimerFired())
            else:
                break
        else:
            raise AssertionError("the scheduler never comes to rest: it keeps asking for timers")
        self.now_s = until_s

    # Engines ------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        for command in self.scheduler.handle(event, self.now_s):
            match command:
                case WakeAt():
                    self.wake_s = command.time_s
                case Refuse():
                    raise AssertionError(f"refused: {command}")
                case Dispatch():
                    self.left[command.rid] = command
                    self.left_s[command.rid] = self.now_s
                    self.waiting_at[command.prefill].append(command.rid)
                    self.at(0.001, lambda name=command.prefill: self.start(name))

    def say(self, messages: list[EndForward]) -> None:
        for message in messages:
            if message.instance_id not in self.mute:
                self.listener.receive(encode_endforward(message))

    def start(self, name: str) -> None:
        """An engine that computes nothing takes in what came, and computes."""
        engine = self.prefills[name]
        if engine.running is not None:
            return
        rids, self.waiting_at[name] = self.waiting_at[name], []
        for rid in rids:
            if rid not in self.ended:
                command = self.left[rid]
                engine.accept(rid, command.prefill_rank, PROMPT)
                self.decodes[command.decode].accept(rid, command.decode_rank, PROMPT)
                self.say([self.decodes[command.decode].message(command.decode_rank)])
        if engine.has_work:
            self.say(engine.launch())
            self.at(engine.forward_s, lambda: self.finish(name))

    def finish(self, name: str) -> None:
        done, messages = self.prefills[name].finish()
        self.say(messages)
        for rid in done:
            if rid not in self.ended:
                self.tell(PrefillDone(rid=rid))
                self.at(0.3, lambda rid=rid: self.end(rid, "completed"))
        self.start(name)

    def end(self, rid: str, outcome: Literal["completed", "failed"]) -> None:
        if rid in self.ended:
            return
        self.ended.add(rid)
        for engine in self.prefills.values():
            engine.abort(rid)
        for decode in self.decodes.values():
            decode.end(rid)
        self.tell(RequestEnded(rid=rid, outcome=outcome, completion_tokens=OUTPUT))

    def lose(self, worker: Worker) -> None:
        """The relay ends what it has sent to an engine that is believed to have restarted."""
        for rid, command in list(self.left.items()):
            if worker.url in (command.prefill, command.decode):
                self.end(rid, "failed")

    def beat(self) -> None:
        for engine in self.prefills.values():
            # A rank that computes says nothing.
            if engine.running is None:
                self.say([engine.message(rank, "heartbeat") for rank in range(DP)])
        for decode in self.decodes.values():
            self.say([decode.message(rank) for rank in range(DP)])

    def poll(self) -> None:
        """Poll like the monitor: while something of ours is there, and no report comes."""
        busy = {
            name
            for rid, command in self.left.items()
            if rid not in self.ended
            for name in (command.prefill, command.decode)
        }
        for name in busy & self.polled:
            worker = self.registry.get(name)
            if worker is None or worker.reporting(self.now_s):
                continue
            queued = running = held = [0] * DP
            if name in self.prefills:
                queued = [rank.queued_tokens for rank in self.prefills[name].ranks]
            else:
                running = [len(of_rank) for of_rank in self.decodes[name].running]
                held = [sum(of_rank.values()) for of_rank in self.decodes[name].running]
            self.tell(
                LoadPolled(
                    instance=name, queued_tokens=queued, running_requests=running, kv_tokens=held
                )
            )

    # Requests -----------------------------------------------------------------------------

    def arrive(self, *exclude: str) -> str:
        rid = f"r{next(self.numbers)}"
        self.tell(
            RequestArrived(
                rid=rid, prompt_tokens=PROMPT, max_new_tokens=OUTPUT, exclude=tuple(exclude)
            )
        )
        return rid

    def serve(self, *exclude: str) -> Dispatch:
        """One request more is dispatched promptly and comes to its end."""
        rid = self.arrive(*exclude)
        self.run(PROMPTLY_S)
        assert rid in self.left, f"not dispatched within {PROMPTLY_S} s"
        return self.left[rid]

    def lie(self, liar: str, lie: dict[str, Any]) -> None:
        """A message in the name of the liar. ``seq``: from the true one on."""
        fields = dict(lie)
        index = fields.pop("dp_rank", 0)
        if liar in self.prefills:
            engine, seq = self.prefills[liar], self.prefills[liar].ranks[index].seq
        else:
            engine, seq = self.decodes[liar], self.decodes[liar].seq[index]
        boot = fields.pop("boot", "")
        values: dict[str, Any] = {
            "instance_id": liar,
            "boot_id": boot or f"{liar}-{engine.boots}",
            "role": "prefill" if liar in self.prefills else "decode",
            "dp_rank": index,
            "dp_size": DP,
            "kind": "heartbeat",
        }
        fields["seq"] = fields.get("seq", min(HUGE, seq + fields.pop("ahead", 0)))
        self.listener.receive(encode_endforward(EndForward(**{**values, **fields})))


def check(
    liar: str,
    lies: list[tuple[float, tuple[int, ...], dict[str, Any]]],
    after: After = "silence",
    *,
    shows_boot: bool = True,
    limits: bool = True,
    plugin: bool = False,
    trigger: str = "adaptive",
) -> None:
    cluster = Cluster(liar, shows_boot=shows_boot, limits=limits, plugin=plugin, trigger=trigger)
    cluster.run(0.5)
    for _ in range(3):
        cluster.serve()
    for pause_s, ranks, lie in lies:
        for rank in ranks:
            cluster.lie(liar, {"dp_rank": rank, **lie})
        rid = cluster.arrive(liar)
        anywhere = cluster.arrive()
        cluster.run(pause_s)
        if trigger == "adaptive":  # the paper's waits for the next instance in turn, whoever it is
            cluster.run(max(0.0, PROMPTLY_S - pause_s))
            assert rid in cluster.left, "the others do not serve"
            assert anywhere in cluster.left
    if after == "truth":
        cluster.mute.discard(liar)
    else:
        cluster.mute.add(liar)
    if after == "polls":
        cluster.polled.add(liar)
    prefill = cluster.scheduler.prefill.get(liar)
    watchdog_s = 0.0
    if prefill is not None:
        # Of an instance that launched its first pass, and whose pass is predicted from a lie.
        watchdog_s = 4 * prefill.watchdog.timeout_s + prefill.model.predict_s([2 * CHUNK] * DP)
        assert watchdog_s < 120.0
    cluster.run(LOST_S + max(watchdog_s, SILENT_S, 2 * RESUME_S) + 1.0)
    other = {P0: P1, D0: D1}[liar]
    for _ in range(3):
        dispatch = cluster.serve(other)
        assert liar in (dispatch.prefill, dispatch.decode)
    cluster.run(10.0)
    assert len(cluster.scheduler.queue) == 0
    assert set(cluster.left) == cluster.ended


count = st.sampled_from([0, 1, 1_000, 10**6, 10**9, HUGE])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "ahead": st.sampled_from([0, 1, 2, 500, 2000, HUGE]),
    "boot": st.sampled_from(["other", "another"]),
    "tokens_per_rank": st.lists(count, min_size=1, max_size=3),
    "forward_s": st.sampled_from([1e-9, 0.1, 5.0, 3600.0]),
    "age_s": st.sampled_from([-1.0, 0.0, 10.0, 3600.0]),
    **dict.fromkeys(
        (
            *("forward_id", "extend_tokens", "inflight_passes", "accepted_requests"),
            *("waiting_requests", "waiting_tokens", "bootstrapping_requests"),
            *("chunk_remainder_tokens", "kv_transfer_requests", "running_requests", "kv_tokens"),
            *("kv_capacity_tokens", "max_running_requests"),
        ),
        count,
    ),
}
lie = st.fixed_dictionaries(
    {"kind": st.sampled_from(["launch", "forward", "idle", "heartbeat"])}, optional=FIELDS
)


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    liar=st.sampled_from([P0, D0]),
    lies=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.01, 0.5, 3.0]),
            st.sampled_from([(0,), (1,), (0, 1), (0, 1)]),
            lie,
        ),
        min_size=1,
        max_size=5,
    ),
    after=st.sampled_from(["truth", "silence", "polls"]),
    shows_boot=st.booleans(),
    limits=st.booleans(),
    plugin=st.booleans(),
    trigger=st.sampled_from(["adaptive", "adaptive", "paper"]),
)
def test_whatever_is_said_in_the_name_of_one_engine_all_serve(
    liar, lies, after, shows_boot, limits, plugin, trigger
):
    check(liar, lies, after, shows_boot=shows_boot, limits=limits, plugin=plugin, trigger=trigger)


@pytest.mark.parametrize("trigger", ["adaptive", "paper"])
@pytest.mark.parametrize("after", ["truth", "silence"])
@pytest.mark.parametrize(
    ("liar", "lie"),
    [
        (D0, {"running_requests": 10**6}),
        (D0, {"kv_tokens": HUGE, "kv_transfer_requests": HUGE}),
        (D0, {"kv_capacity_tokens": 1, "max_running_requests": 1, "running_requests": 1}),
        (D0, {"seq": HUGE, "running_requests": 10**6}),
        (P0, {"kind": "launch", "forward_id": HUGE, "tokens_per_rank": [HUGE, HUGE]}),
        (P0, {"kind": "launch", "forward_id": 9, "extend_tokens": HUGE}),
        (P0, {"kind": "forward", "forward_id": HUGE, "forward_s": 3600.0, "extend_tokens": 1}),
    ],
    ids=str,
)
def test_one_message_takes_no_engine_out_of_service(liar, lie, after, trigger):
    for plugin, limits in itertools.product((False, True), repeat=2):
        lies = [(3.0, tuple(range(DP)), lie)]
        check(liar, lies, after, limits=limits, plugin=plugin, trigger=trigger)


@pytest.mark.parametrize("polls", [False, True])
def test_a_decode_engine_that_was_full_of_others_requests_when_it_fell_silent_is_used_again(polls):
    cluster = Cluster(D0, shows_boot=True, limits=True, plugin=True, trigger="adaptive")
    for rank in range(DP):
        for number in range(MAX_RUNNING):
            cluster.decodes[D0].accept(f"foreign-{rank}-{number}", rank, 1000)
    cluster.run(2.0)
    waits = cluster.arrive(D1)
    cluster.run(1.0)
    assert waits not in cluster.left, "it is full"
    cluster.mute.add(D0)
    for of_rank in cluster.decodes[D0].running:
        of_rank.clear()
    if polls:
        cluster.polled.add(D0)
    cluster.run(SILENT_S)
    assert cluster.left[waits].decode == D0
    for _ in range(3):
        cluster.serve(D1)


def test_polls_of_a_silent_decode_engine_count_and_are_forgotten_when_they_end():
    cluster = Cluster(D0, shows_boot=True, limits=True, plugin=True, trigger="adaptive")
    cluster.run(2.0)
    cluster.mute.add(D0)
    cluster.run(SILENT_S + 1.0)
    for rank in range(DP):
        for number in range(MAX_RUNNING):
            cluster.decodes[D0].accept(f"foreign-{rank}-{number}", rank, 1000)
    cluster.polled.add(D0)
    cluster.serve(D1)
    waits = cluster.arrive(D1)
    cluster.run(1.0)
    assert waits not in cluster.left, "a poll said that it is full"
    cluster.run(SILENT_S)
    assert waits in cluster.left, "nothing of ours is there, so nobody polls it"
