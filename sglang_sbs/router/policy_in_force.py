"""Which policy decides at present, since when, and by whose wish: one of these in each process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from sglang_sbs.scheduling.policy_registry import Policy, spec_of

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PolicyState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Travels between processes (``processes/messages.py``)."""

    policy: Annotated[str, msgspec.Meta(max_length=64)]
    since_s: float = 0.0
    """Unix time."""
    by: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Front end that was asked to switch; empty: ``--policy``."""
    term: _Number = 0
    """Of the scheduler that switched."""
    switches: _Number = 0
    """Since the command line's policy."""
    back_to: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """A trial has switched, and this is the policy that it began with; empty: none runs."""

    @property
    def age(self) -> tuple[int, int]:
        """Larger is newer. Every switch of any scheduler has another."""
        return self.term, self.switches


class PolicyInForce:
    def __init__(self, policy: Policy) -> None:
        """``policy``: of the command line."""
        self.state = PolicyState(policy, time.time())
        self.listeners: list[Callable[[Policy], None]] = []
        """Told of each policy that is switched to, in order."""

    @property
    def policy(self) -> Policy:
        return self.state.policy

    @property
    def lasting(self) -> Policy:
        """The policy that remains when nobody carries a trial on."""
        back_to = self.state.back_to
        return back_to if spec_of(back_to) else self.policy

    def switch(self, policy: Policy, by: str, term: int = 0, back_to: str = "") -> None:
        """``by``: the front end that was asked. ``back_to``: see :class:`PolicyState`. Nothing
        happens if all of that is in force."""
        if policy != self.policy or back_to != self.state.back_to:
            switches = self.state.switches + 1
            self._become(PolicyState(policy, time.time(), by[:256], term, switches, back_to))

    def inherit(self, state: PolicyState | None, term: int = 0) -> bool:
        """Take over a switch that this scheduler does not know of; whether it was by a trial. A
        trial ends with its scheduler: its policy is replaced by that it began with, in this
        scheduler's ``term``."""
        if state is None or state.age <= self.state.age:
            return False
        if not state.back_to:
            self._become(state)
            return False
        if spec_of(state.back_to) is None:
            return False  # of another release, or not installed here
        by, term = "the end of a trial whose scheduler is gone", max(term, state.term)
        self._become(PolicyState(state.back_to, time.time(), by, term, state.switches + 1))
        return True

    def follow(self, state: PolicyState | None) -> None:
        """Do as the scheduler does, unless this process knows of a later switch."""
        if state is not None and state.age >= self.state.age:
            self._become(state)

    def _become(self, state: PolicyState) -> None:
        if spec_of(state.policy) is None:
            return  # of another release, or not installed here
        before, self.state = self.state, state
        if state.policy != before.policy:
            for told in self.listeners:
                told(self.policy)
