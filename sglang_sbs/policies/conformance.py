"""Requirements for all policies, built-in or not: each runs on the simulated cluster, with every
command of the scheduler checked.

``sglang-sbs policies --check NAME`` prints one line for each. In tests of your own::

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    def test_conforms(check):
        check.run("my_policy")
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_sbs.scheduling import (
    Command,
    Dispatch,
    Event,
    InstanceDown,
    InstanceUp,
    PolicySwitched,
    Refuse,
    RequestArrived,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
)
from sglang_sbs.scheduling.policy_registry import Policy
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.cost import PassCost
from sglang_sbs.simulator.cluster.outcome import Outcome
from sglang_sbs.simulator.cluster.simulation import Simulation
from sglang_sbs.simulator.cluster.spec import ClusterSpec, TopologyChange

_COST = PassCost(fixed_s=0.02, max_s=1e-5)
_BLOCK = 64


class NonconformityError(AssertionError):
    """A policy violates a requirement; the message names the requirement and the time."""


@dataclass(frozen=True)
class Check:
    name: str
    """The requirement that it checks."""
    spec: dict[str, Any] = field(default_factory=dict)
    """Fields of the simulated cluster that differ from three prefill instances with four DP ranks
    each."""
    config: dict[str, Any] = field(default_factory=dict)
    switches: bool = False
    """True: the check switches to ``least_tokens`` and back repeatedly."""
    twice: bool = False
    """True: run twice; the same events must give the same commands."""
    may_refuse: bool = False

    def __str__(self) -> str:
        return self.name

    def run(self, policy: Policy, requests: int = 300) -> None:
        """Run the check. Raises: NonconformityError, and any exception of the policy."""
        first = self._commands(policy, requests)
        if self.twice and self._commands(policy, requests) != first:
            raise NonconformityError("the same events gave other commands: seed what is random")

    def _commands(self, policy: Policy, requests: int) -> list[list[Command]]:
        spec = ClusterSpec(**{**_SPEC, **self.spec})
        config = SchedulerConfig(policy=policy, **self.config)
        checked = _Checked(config, policy if self.switches else None)
        outcome = Outcome()
        simulation = Simulation(outcome, checked, spec)
        simulation.start(_arrivals(requests))
        simulation.end()
        checked.end()
        for record in outcome.requests:
            if record.refused is not None and not self.may_refuse:
                raise NonconformityError(f"{record.rid} was refused: {record.refused}")
            if record.ends != 1:
                raise NonconformityError(f"{record.rid} ended {record.ends} times")
        return checked.commands


_SPEC: dict[str, Any] = {
    **{"cost": _COST, "prefill_instances": 3, "dp_size": 4, "chunk_tokens": 2048},
    **{"decode_dp_size": 8, "decode_s": 0.2},
}
_CHANGES = (
    TopologyChange(0.3, "down", "p0"),
    TopologyChange(0.6, "drain", "p1"),
    TopologyChange(0.9, "up", "p0"),
    TopologyChange(1.2, "up", "p1"),
)
CHECKS = (
    Check("every request ends exactly once, and waits for nothing that is not there", twice=True),
    Check("instances die, are drained and come back", {"changes": _CHANGES}),
    Check("no report of a pass arrives", {"endforward_loss": 1.0}),
    Check("reports are lost, late and doubled",
        {"endforward_loss": 0.3, "endforward_delay_s": 0.05, "endforward_duplicates": 0.3}),
    Check("engines look one pass ahead", {"overlap": True}),
    Check("each DP rank makes passes of its own", {"barrier": False}),
    Check("ranks have caches and pages",
        {"block_tokens": _BLOCK, "page_size": _BLOCK, "kv_capacity_tokens": 40_000}),
    Check("decode has little room",
        {"decode_kv_capacity_tokens": 20_000, "decode_max_running_requests": 4}),
    Check("one instance of one rank", {"prefill_instances": 1, "dp_size": 1, "decode_dp_size": 1}),
    Check("the queue is full", config={"max_queue_requests": 3}, may_refuse=True),
    Check("it is switched from and to", switches=True),
)  # fmt: skip


def _arrivals(requests: int) -> list[Arrival]:
    """Return arrivals with short and with long prompts, in conversations that share their first
    tokens. Of each five requests, three arrive together."""
    rng = random.Random("conformance")
    arrivals, now_s = [], 0.0
    for number in range(requests):
        now_s += 0.0 if number % 5 < 2 else rng.expovariate(150)
        tokens = rng.choice((40, 400, 1500, 1500, 9000))
        first = 1000 * rng.randrange(8)
        blocks = tuple(range(first, first + tokens // _BLOCK))
        arrivals.append(Arrival(now_s, tokens, 50, blocks, session=str(first)))
    return arrivals


class _Checked:
    def __init__(self, config: SchedulerConfig, switched: Policy | None) -> None:
        self._scheduler = Scheduler(config)
        self._switched = switched
        self._sizes: dict[str, int] = {}
        """Number of DP ranks of each running instance."""
        self._waiting: set[str] = set()
        self._dispatched: set[str] = set()
        self.commands: list[list[Command]] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case InstanceUp():
                self._sizes[event.instance] = event.dp_size
            case InstanceDown():
                self._sizes.pop(event.instance, None)
            case RequestArrived():
                self._waiting.add(event.rid)
            case RequestEnded():
                self._waiting.discard(event.rid)
                self._dispatched.discard(event.rid)
        commands = self._scheduler.handle(event, now_s)
        if self._switched is not None and len(self.commands) % 7 == 0:
            other = self._switched if len(self.commands) % 2 else "least_tokens"
            commands += self._scheduler.handle(PolicySwitched(policy=other), now_s)
        for command in commands:
            if isinstance(command, Dispatch):
                self._check(command, now_s)
            elif isinstance(command, Refuse):
                self._waiting.discard(command.rid)
        self.commands.append(commands)
        return commands

    def _check(self, command: Dispatch, now_s: float) -> None:
        where = f"{command.rid} at {now_s:.3f} s"
        if command.rid not in self._waiting:
            raise NonconformityError(f"{where}: dispatched, and it does not wait")
        self._waiting.remove(command.rid)
        self._dispatched.add(command.rid)
        for name, rank in (
            (command.prefill, command.prefill_rank),
            (command.decode, command.decode_rank),
        ):
            if not 0 <= rank < self._sizes.get(name, 0):
                raise NonconformityError(f"{where}: rank {rank} of {name}, which is not up")

    def end(self) -> None:
        for left, what in ((self._waiting, "still waits"), (self._dispatched, "never ended")):
            if left:
                raise NonconformityError(f"{min(left)} {what} at the end, of {len(left)} like it")
        if self._scheduler.in_flight_requests or len(self._scheduler.queue):
            raise NonconformityError("the scheduler's books are not empty at the end")


def failures(policy: Policy, checks: Sequence[Check] = CHECKS,
    show: Callable[[Check, str], None] = lambda _check, _why: None) -> int:  # fmt: skip
    """Return the number of failed checks. ``show`` is called with each check and its failure, which
    is empty if the check passed."""
    failed = 0
    for check in checks:
        try:
            check.run(policy)
            why = ""
        except Exception as error:  # third-party code
            why = f"{type(error).__name__}: {error}"
            failed += 1
        show(check, why)
    return failed
