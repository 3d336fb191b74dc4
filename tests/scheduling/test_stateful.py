"""The scheduler against engines that may lie late, twice, out of order or not at all.

A hypothesis state machine drives the real scheduler and its engines (:mod:`scheduler_world`):
requests arrive, are dispatched, accepted, computed and answered, while messages are lost, repeated
and reordered, engines restart and clients leave.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import (
    DECODES,
    MAX_QUEUE,
    N_LIMIT,
    OUTPUT_TOKENS,
    PAGE,
    PREFILLS,
    TIMEOUT_S,
    Known,
    World,
)

from sglang_sbs.scheduling import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    InstanceDown,
    LoadPolled,
    PolicySwitched,
    PrefillDone,
    RequestArrived,
    RequestEnded,
    SchedulerConfig,
    TimerFired,
)


class SchedulerMachine(World, RuleBasedStateMachine):
    """Possible events, and properties that hold after each of them."""

    # Rules --------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        for name in [*PREFILLS, *DECODES]:
            self.submit(name)

    @rule(
        tokens=st.one_of(st.integers(0, 600), st.integers(600, 3900)),
        count=st.integers(1, 5),
        deadline=st.sampled_from([None, None, 0.2, 3.0]),
        exclude=st.sampled_from([(), (), (), ("p0",), ("p1", "d0"), tuple(PREFILLS)]),
        chain=st.lists(st.sampled_from("ab"), min_size=1, max_size=30),
        urgency=st.sampled_from([(0, None), (0, None), (1, None), (-9, None), (0, 0.5), (2, 30.0)]),
        tenant=st.sampled_from(["", "", "a", "b"]),
    )
    def arrive(self, tokens, count, deadline, exclude, chain, urgency, tenant) -> None:
        for _ in range(count):
            rid = f"r{len(self.requests)}"
            deadline_s = None if deadline is None else self.now_s + deadline
            known = Known(rid, max(1, tokens), self.now_s, deadline_s or self.now_s + TIMEOUT_S)
            self.requests[rid] = known
            self.tell(
                RequestArrived(
                    rid=rid,
                    prompt_tokens=tokens,
                    max_new_tokens=OUTPUT_TOKENS,
                    deadline_s=deadline_s,
                    exclude=exclude,
                    blocks=self.names(chain[: tokens // PAGE]),
                    block_tokens=PAGE,
                    priority=urgency[0],
                    ttft_slo_s=urgency[1],
                    tenant=tenant,
                )
            )

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.01, 0.06, 0.1, 0.5, 2.0]))
    def wait(self, seconds) -> None:
        self.pass_time(seconds)

    @rule(
        seconds=st.sampled_from([0.01, 0.1, 0.5]),
        fate=st.sampled_from(["lose", "repeat", "delay"]),
    )
    def wait_with_a_bad_network(self, seconds, fate) -> None:
        self.pass_time(seconds, fate)

    @precondition(lambda self: self.held_back)
    @rule(data=st.data())
    def deliver_late(self, data) -> None:
        index = data.draw(st.integers(0, len(self.held_back) - 1))
        self.tell(self.held_back.pop(index))

    @precondition(lambda self: self.sent_before)
    @rule(data=st.data())
    def deliver_again(self, data) -> None:
        """An old message once more, perhaps of an earlier boot."""
        self.faulty = True
        self.tell(data.draw(st.sampled_from(self.sent_before)))

    @rule()
    def early_timer(self) -> None:
        self.tell(TimerFired())

    @rule()
    def beat(self) -> None:
        self.heartbeat()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), outcome=st.sampled_from(["aborted", "failed"]))
    def client_leaves(self, data, outcome) -> None:
        self.ended(data.draw(st.sampled_from(self.live)), outcome)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), kind=st.sampled_from(["done", "ended", "arrived"]))
    def stray_event(self, data, kind) -> None:
        """Late, repeated, or about a request nobody knows."""
        over = [k.rid for k in self.requests.values() if k.state in ("refused", "ended")]
        done = [k.rid for k in self.requests.values() if k.prefilled]
        match kind:
            case "done":
                self.tell(PrefillDone(rid=data.draw(st.sampled_from(["unknown", *over, *done]))))
            case "ended":
                rid = data.draw(st.sampled_from(["unknown", *over]))
                self.tell(RequestEnded(rid=rid, outcome="aborted"))
            case "arrived" if self.live:
                rid = data.draw(st.sampled_from(self.live)).rid
                self.tell(RequestArrived(rid=rid, prompt_tokens=7))

    @rule(
        name=st.sampled_from([*PREFILLS, *DECODES]),
        notice=st.booleans(),
        dp_size=st.sampled_from([None, 1, 2, 4]),
    )
    def engine_restarts(self, name, notice, dp_size) -> None:
        """Everything on it fails; the registry may or may not see it go down and come up."""
        self.faulty = True
        engine = self.prefills.get(name) or self.decodes[name]
        if notice:
            self.go_down(name)
            engine.dp_size = dp_size or engine.dp_size
            self.shape[name] = (engine.dp_size, self.shape[name][1])
        engine.start()
        for known in self.requests.values():  # also those that run there; they fail one by one
            known.lost_at_decode |= known.dispatch is not None and known.dispatch.decode == name
        self.ends_s.pop(name, None)
        for known in list(self.requests.values()):
            dispatch = known.dispatch
            at_prefill = dispatch is not None and dispatch.prefill == name and not known.prefilled
            at_decode = dispatch is not None and dispatch.decode == name
            if known.state == "dispatched" and known.delivered and (at_prefill or at_decode):
                self.ended(known, "failed")
        if notice:
            self.submit(name)

    @rule(name=st.sampled_from([*PREFILLS, *DECODES]))
    def go_down(self, name) -> None:
        """The registry takes it out of service; what runs there goes on."""
        self.up.discard(name)
        self.faulty = True
        self.tell(InstanceDown(instance=name))

    @rule(name=st.sampled_from([*PREFILLS, *DECODES]))
    def come_up(self, name) -> None:
        self.submit(name)

    @rule(name=st.sampled_from(list(PREFILLS)))
    def poll(self, name) -> None:
        engine = self.prefills[name]
        tokens = [rank.queued_tokens for rank in engine.ranks]
        zeros = [0] * engine.dp_size
        self.tell(
            LoadPolled(instance=name, queued_tokens=tokens, running_requests=zeros, kv_tokens=zeros)
        )

    @staticmethod
    def names(chain) -> list[int]:
        """Names of blocks, each after all before it."""
        return [int("1" + "".join(chain[: i + 1]), 16) for i in range(len(chain))]

    @rule(
        name=st.sampled_from(list(PREFILLS)),
        rank=st.integers(0, 3),
        chain=st.lists(st.sampled_from("ab"), min_size=1, max_size=30),
        what=st.sampled_from(["stored", "stored", "removed", "cleared"]),
    )
    def cache(self, name, rank, chain, what) -> None:
        """A rank says what became of its cache."""
        match what:
            case "stored":
                event = BlocksStored(instance=name, dp_rank=rank, blocks=self.names(chain))
            case "removed":
                event = BlocksRemoved(instance=name, dp_rank=rank, blocks=self.names(chain)[-1:])
            case _:
                event = BlocksCleared(instance=name, dp_rank=rank)
        self.tell(event)

    @rule()
    def quiet_period(self) -> None:
        """Faults stop and all engines report, so the queue drains and the books are true."""
        self.held_back.clear()
        for name in [*PREFILLS, *DECODES]:
            if name not in self.up:
                self.submit(name)
        self.heartbeat()
        self.pass_time(TIMEOUT_S / 2)
        self.heartbeat()
        self.pass_time(TIMEOUT_S / 2 + 1)
        assert not self.inbox
        assert not self.live, "requests wait although nothing hinders them"
        self.heartbeat()
        self.faulty = False
        for name, engine in self.prefills.items():
            instance = self.scheduler.prefill[name]
            assert instance.idle
            assert instance.ready
            assert instance.ranks.c_avail() == [engine.chunk_tokens] * engine.dp_size
        assert self.scheduler.prefix.prefill.pending_requests == 0
        assert not self.scheduler.prefix.prefill._watched
        for decode in self.scheduler.decode.values():
            for load in decode.loads():
                assert (load.running, load.kv_tokens, load.committed_tokens) == (0, 0, 0)

    # Invariants ---------------------------------------------------------------------------

    @invariant()
    def books_and_truth_agree_on_requests(self) -> None:
        queued = {k.rid for k in self.requests.values() if k.state == "queued"}
        dispatched = {k.rid for k in self.requests.values() if k.state == "dispatched"}
        queue = self.scheduler.queue
        assert {r.rid for r in queue} == queued
        uncached = sum(r.uncached_tokens for r in queue)
        assert queue.tokens == uncached
        assert uncached <= sum(self.requests[rid].tokens for rid in queued)
        assert sorted(r.rid for r in queue.in_order()) == sorted(queued)
        assert self.scheduler.in_flight_requests == len(dispatched)
        assert len(queued) <= MAX_QUEUE

    @invariant()
    def nobody_waits_past_a_deadline(self) -> None:
        queued = [k for k in self.requests.values() if k.state == "queued"]
        if queued:
            assert self.wake_s is not None, "requests wait and no timer is set"
            assert self.wake_s <= min(k.deadline_s for k in queued)

    @invariant()
    def flow_control_is_on_exactly_while_somebody_waits_too_long(self) -> None:
        longest = max((r.waited_cycles for r in self.scheduler.queue), default=0)
        assert self.scheduler.throttled == (longest > N_LIMIT)

    @invariant()
    def cached_sums_are_the_sums(self) -> None:
        for instance in self.scheduler.prefill.values():
            assert instance.ranks.backlog_tokens == sum(r.backlog_tokens for r in instance.ranks)
            assert instance.ranks.has_room == any(c > 0 for c in instance.ranks.c_avail())
            in_flight = [request for rank in instance.ranks for request in rank.flight]
            assert instance.ranks.has_flight == any(r.sent is not None for r in in_flight)
            assert instance.ranks.has_outstanding == any(r.requests for r in instance.ranks)
            for rank in instance.ranks:
                flight_tokens = [request.flight_tokens for request in rank.flight]
                assert rank.flight.total == sum(flight_tokens)
                assert min(flight_tokens, default=0) >= 0
                assert all(rank.requests[request.rid] is request for request in rank.flight)
                assert rank.outstanding_tokens == sum(r.tokens for r in rank.requests.values())
                assert rank.queued_tokens >= 0
        for decode in self.scheduler.decode.values():
            assert decode.room_tokens == max(load.room_tokens for load in decode.loads())

    @invariant()
    def the_ledger_is_the_truth_while_nothing_is_lost(self) -> None:
        if self.faulty or self.received_kinds != SchedulerMachine.received_kinds:
            return
        for name, engine in self.prefills.items():
            instance = self.scheduler.prefill[name]
            if instance.tier != "endforward":
                continue
            for index, rank in enumerate(engine.ranks):
                on_the_way = sum(
                    k.uncached_tokens
                    for k in self.inbox
                    if (k.dispatch.prefill, k.dispatch.prefill_rank) == (name, index)
                )
                assert instance.ranks[index].backlog_tokens == on_the_way + rank.queued_tokens


class SwitchingMachine(SchedulerMachine):
    """The policy is switched now and again."""

    @rule(policy=st.sampled_from(["sbs", "sbs", "eta", "round_robin", "cache_aware"]))
    def switch(self, policy) -> None:
        self.tell(PolicySwitched(policy=policy))
        assert self.scheduler.snapshot(self.now_s).policy == policy


def configured(
    received_kinds=SchedulerMachine.received_kinds,
    prefix_source="off",
    base=SchedulerMachine,
    **config,
):
    """A test case of the machine with this configuration."""

    class Machine(base):
        pass

    Machine.received_kinds = received_kinds
    Machine.prefix_source = prefix_source
    Machine.config = SchedulerConfig(
        n_limit=N_LIMIT,
        max_queue_requests=MAX_QUEUE,
        default_timeout_s=TIMEOUT_S,
        default_output_tokens=OUTPUT_TOKENS,
        **config,
    )
    Machine.TestCase.settings = settings(
        max_examples=20,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return Machine.TestCase


TestAdaptive = configured()
TestAdaptiveIqr = configured(decode_rule="iqr")
TestPaper = configured(trigger="paper", decode_rule="iqr")
TestAdaptiveWithoutPlugin = configured(received_kinds=())
TestPaperWithoutPlugin = configured(received_kinds=(), trigger="paper")
TestAdaptiveHeartbeatsOnly = configured(received_kinds=("heartbeat",))
TestPaperHeartbeatsOnly = configured(received_kinds=("heartbeat",), trigger="paper")
TestCacheAware = configured(prefix_source="events")
TestCacheAwarePaper = configured(prefix_source="events", trigger="paper")
TestCacheAwareApproximate = configured(prefix_source="approximate")
TestCacheAwareWithoutPlugin = configured(received_kinds=(), prefix_source="events")
TestEta = configured(policy="eta")
TestLeastTokens = configured(policy="least_tokens")
TestSwitching = configured(base=SwitchingMachine, prefix_source="events")
TestSwitchingPaper = configured(base=SwitchingMachine, trigger="paper")
