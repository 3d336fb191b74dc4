"""Decides which policy is in force at each time of a trial, and when the trial ends. Sans-I/O:
events and ``now`` in, commands out.

Theory of operation
-------------------
A trial is a sequence of slots of equal length. In each slot one policy places every request.
Otherwise requests of both policies would share passes and wait for each other. Slots come in pairs
with one slot of each policy, in an order drawn from the seed, so that a drift of the load favours
neither. :mod:`.slots` defines which requests count. TTFT is the time from the arrival of a request
at the scheduler to the answer of prefill, which has then computed the first token.

A slot is *settled* when all of its counted requests are answered, or one slot length after its end.
Requests that still wait then count with their wait so far. After each settled pair the verdict is
computed (:mod:`.sequential`). The trial ends

- when the interval excludes 1, or is narrow enough;
- after the last slot;
- when a limit is broken;
- by :meth:`Trial.stop`.

The last command is always :class:`Ended`. The policy in force is then the one that the trial began
with, or the winner."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_sbs.scheduling.events import (
    Command,
    Event,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
)
from sglang_sbs.scheduling.policy_registry import Policy
from sglang_sbs.trial.ratios import Ratio
from sglang_sbs.trial.sequential import interval
from sglang_sbs.trial.slots import LEAST_REQUESTS, Adjustment, Arm, Block, Slot, SlotPair, pair_of
from sglang_sbs.trial.spec import TrialSpec

ALPHA = 0.05
LEAST_PAIRS = 3
LEAST_SD = 0.01
"""Smallest standard deviation assumed for the pairs' differences: the adjustment for tokens is not
exact, so a smaller one is not credible."""
LIMIT_SHARE = 0.01
"""Share of a slot's requests that may exceed ``p99_s``."""
LIMIT_LEAST = 5
"""Smallest number of requests in a slot that can break a limit (``p99_s`` or ``refused``)."""
MOST_OPEN = 100_000
ARMS = ("policy", "baseline")

Cause = Literal["certain", "narrow", "slots", "limit", "stopped", "switched", "lost", "failed"]


@dataclass(frozen=True, slots=True)
class Switch:
    policy: Policy


@dataclass(frozen=True, slots=True)
class Ended:
    """The trial has ended; no further commands follow."""

    cause: Cause
    text: str


@dataclass(slots=True)
class _Request:
    slot: Slot
    arrived_s: float
    third: int
    block: Block | None
    """Block in which the request counts; None if it does not count."""
    exceeded: bool = False


class Trial:
    """State of one trial. Call :meth:`begin` once, :meth:`observe` with every event, and
    :meth:`advance` at ``wake_s`` and at least once a second."""

    def __init__(self, spec: TrialSpec, policy: Policy, seed: int) -> None:
        """Create a trial that compares ``policy``, which is in force now, with ``spec.baseline``.
        ``seed`` determines the order of slots."""
        self.spec = spec
        self.policies: tuple[Policy, Policy] = (policy, spec.baseline)
        self.seed = seed
        self.arms = (Arm(), Arm())
        self.verdict: Ratio | None = None
        """Mean TTFT of the policy divided by that of the baseline; its interval is valid over all
        looks."""
        self.pairs: list[SlotPair] = []
        """Settled pairs of slots, which the verdict compares."""
        self.ended: Ended | None = None
        self.done = 0
        self.current: Slot | None = None
        """The present slot; None before the first slot and after the last one."""
        self._random = random.Random(f"trial {seed}")
        self._next: list[int] = []
        """Arms (:attr:`Slot.arm`) of the slots drawn and not begun, the next one last."""
        self._unsettled: deque[Slot] = deque()
        self._first: Slot | None = None
        """Settled slot of a pair whose other slot is not settled; None: no such pair."""
        self._requests: dict[str, _Request] = {}
        """Requests waiting for their first token, in order of arrival."""
        self._adjustment = Adjustment()

    @property
    def wake_s(self) -> float:
        slot = self.current
        return math.inf if slot is None else slot.begin_s + slot.length_s

    def begin(self, now_s: float) -> list[Switch | Ended]:
        return self._begin_slot(now_s)

    def advance(self, now_s: float) -> list[Switch | Ended]:
        """Return the commands due at ``now_s``, which must not decrease."""
        if self.ended is not None:
            return []
        if broken := self._broken(now_s):
            return self._end("limit", broken)
        steps: list[Switch | Ended] = []
        if self.current is not None and now_s >= self.wake_s:
            steps = self._begin_slot(now_s)
        while self._unsettled and self._is_settled(self._unsettled[0], now_s):
            if ending := self._settle(self._unsettled.popleft()):
                return ending
        if self.current is None and not self._unsettled:
            return steps + self._end("slots", self._uncertain())
        return steps

    def stop(self, cause: Cause, text: str) -> list[Switch | Ended]:
        """End the trial at once, and return the commands; none if it has already ended."""
        return [] if self.ended is not None else self._end(cause, text)

    # Slots ------------------------------------------------------------------------------------

    def _begin_slot(self, now_s: float) -> list[Switch | Ended]:
        if (over := self.current) is not None:
            self.done += 1
            self._unsettled.append(over)
        if self.done >= self.spec.slots:
            self.current = None
            return [Switch(self.policies[0])]
        if not self._next:
            self._next = [0, 1]
            self._random.shuffle(self._next)
        self.current = Slot(self._next.pop(), now_s, self.spec.slot_s)
        return [Switch(self.policies[self.current.arm])]

    def _is_settled(self, slot: Slot, now_s: float) -> bool:
        if slot.open and now_s >= slot.begin_s + 2 * slot.length_s:
            for request in [request for request in self._requests.values() if request.slot is slot]:
                self._waited(request, now_s - request.arrived_s)
            self._requests = {
                rid: request for rid, request in self._requests.items() if request.slot is not slot
            }
        return slot.open == 0

    def _settle(self, slot: Slot) -> list[Switch | Ended]:
        """Settle a slot and, if its pair is then complete, compute the verdict. Return the commands
        that end the trial, if it ends now."""
        self.arms[slot.arm].over(slot)
        self._adjustment.add(slot)
        if sum(block.requests for block in slot.blocks) >= LEAST_REQUESTS and not slot.answered:
            return self._end("limit", f"{self.policies[slot.arm]} answered no request of a slot")
        if self._first is None:
            self._first = slot
            return []
        pair, self._first = pair_of(self._first, slot), None
        if pair is None:
            return []
        self.pairs.append(pair)
        self.verdict = verdict = self._judge()
        if len(self.pairs) < LEAST_PAIRS:
            return []
        if verdict.certain:
            faster = self.policies[0 if verdict.high < 1 else 1]
            return self._end("certain", f"{faster} has the lower mean TTFT")
        if verdict.high - verdict.low < self.spec.width:
            return self._end("narrow", self._uncertain())
        return []

    def _judge(self) -> Ratio:
        by = self._adjustment.coefficients
        bounds = interval([pair.adjusted(by) for pair in self.pairs], ALPHA, LEAST_SD)
        mean, low, high = (math.exp(max(-50.0, min(50.0, bound))) for bound in bounds)
        return Ratio(mean, low, high if bounds[2] < 50 else math.inf)

    def _uncertain(self) -> str:
        verdict = self.verdict
        if verdict is None:
            return "too few requests came to compare the two policies"
        if verdict.high - verdict.low < self.spec.width:
            return f"the two differ by less than the wanted width {self.spec.width:g}, if at all"
        return f"no difference is certain after {self.done} slots"

    def _end(self, cause: Cause, text: str) -> list[Switch | Ended]:
        arm = 0
        if cause == "certain" and self.spec.winner and self.verdict is not None:
            arm = 0 if self.verdict.high < 1 else 1
        self.ended = Ended(cause, text)
        self.current = None
        self._requests.clear()
        return [Switch(self.policies[arm]), self.ended]

    # Limits -----------------------------------------------------------------------------------

    def _broken(self, now_s: float) -> str:
        """Return the limit that a slot breaks, as a sentence; empty: none. Requests may wait longer
        than the rest of their slot, so a slot counts until it is settled."""
        limit_s = self.spec.p99_s
        if limit_s is not None:
            for request in self._requests.values():
                if request.arrived_s + limit_s > now_s:
                    break
                self._exceed(request)
        slots = [*self._unsettled, *([] if self.current is None else [self.current])]
        return next(filter(None, (self._broken_by(slot, now_s) for slot in slots)), "")

    def _broken_by(self, slot: Slot, now_s: float) -> str:
        limit_s = self.spec.p99_s
        early = ", in its first third, where the slot before may weigh"
        where = f"a slot of {self.policies[slot.arm]}"
        where += early if slot.place_of(now_s) < 1 / 3 and self.done else ""
        if slot.exceeded >= max(LIMIT_LEAST, LIMIT_SHARE * slot.arrived):
            waited = f"{slot.exceeded} of {slot.arrived} requests waited longer than {limit_s:g} s"
            return f"{waited} for their first token in {where}"
        share = self.spec.refused
        if share is not None and slot.refused >= max(LIMIT_LEAST, share * slot.arrived):
            return f"{slot.refused} of {slot.arrived} requests were refused in {where}"
        return ""

    def _exceed(self, request: _Request) -> None:
        if not request.exceeded:
            request.exceeded = True
            request.slot.exceeded += 1

    # Requests ---------------------------------------------------------------------------------

    def observe(self, event: Event, commands: Sequence[Command], now_s: float) -> None:
        match event:
            case RequestArrived() if self.current is not None:
                self._arrived(self.current, event, now_s)
            case PrefillDone(aborted=False):
                if request := self._requests.pop(event.rid, None):
                    ttft_s = now_s - request.arrived_s
                    if self.spec.p99_s is not None and ttft_s > self.spec.p99_s:
                        self._exceed(request)
                    self._waited(request, ttft_s)
            case RequestEnded():
                if request := self._requests.pop(event.rid, None):
                    request.slot.unanswered += 1
                    self._leave(request)
            case _:
                pass
        for command in commands:
            if isinstance(command, Refuse) and (request := self._requests.pop(command.rid, None)):
                request.slot.refused += 1
                self._leave(request)

    def _arrived(self, slot: Slot, event: RequestArrived, now_s: float) -> None:
        if len(self._requests) >= MOST_OPEN or event.rid in self._requests:
            return
        place = slot.place_of(now_s)
        block = slot.block_of(place)
        self._requests[event.rid] = _Request(slot, now_s, min(2, int(3 * place)), block)
        slot.arrived += 1
        if block is not None:
            block.requests += 1
            block.tokens += event.prompt_tokens
            slot.open += 1

    def _waited(self, request: _Request, ttft_s: float) -> None:
        arm = self.arms[request.slot.arm]
        arm.thirds[request.third][0] += 1
        arm.thirds[request.third][1] += ttft_s
        if request.block is not None:
            request.block.answered += 1
            request.block.ttft_s += ttft_s
            arm.waited(ttft_s)
        self._leave(request)

    @staticmethod
    def _leave(request: _Request) -> None:
        """Record that a request no longer waits for its first token."""
        if request.block is not None:
            request.slot.open -= 1
