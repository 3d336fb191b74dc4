"""Tracks the policy in force, which process set it, and when. Each process has one record."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from sglang_sbs.scheduling.policy_registry import Policy, spec_of

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PolicyState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The policy in force and its origin, sent between processes (``processes/messages.py``)."""

    policy: Annotated[str, msgspec.Meta(max_length=64)]
    since_s: float = 0.0
    """Unix time of the switch, in seconds."""
    by: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Front end that received the request to switch; empty: ``--policy``."""
    term: _Number = 0
    """Term of the scheduler that switched."""
    switches: _Number = 0
    """Number of switches since the command line's policy."""
    back_to: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Policy to restore when the running trial ends; empty without a trial."""

    @property
    def age(self) -> tuple[int, int]:
        """``(term, switches)``, which orders the states of all schedulers: the larger is newer, and
        no two switches have the same."""
        return self.term, self.switches


class PolicyInForce:
    def __init__(self, policy: Policy) -> None:
        """Create the record; ``policy`` is the command line's."""
        self.state = PolicyState(policy, time.time())
        self.listeners: list[Callable[[Policy], None]] = []
        """Functions called with each new policy, in this order."""

    @property
    def policy(self) -> Policy:
        return self.state.policy

    @property
    def lasting(self) -> Policy:
        """Policy that remains when a running trial is not continued."""
        back_to = self.state.back_to
        return back_to if spec_of(back_to) else self.policy

    def switch(self, policy: Policy, by: str, term: int = 0, back_to: str = "") -> None:
        """Switch the policy. ``by``: front end that received the request; ``term``: the
        scheduler's; ``back_to``: policy to restore after a trial. Does nothing if policy and
        ``back_to`` are unchanged."""
        if policy != self.policy or back_to != self.state.back_to:
            switches = self.state.switches + 1
            self._become(PolicyState(policy, time.time(), by[:256], term, switches, back_to))

    def inherit(self, state: PolicyState | None, term: int = 0) -> bool:
        """Adopt a newer state of a former scheduler, and return whether a trial was ended. If the
        state was set by a trial, the policy before the trial is restored, in this scheduler's
        ``term``."""
        if state is None or state.age <= self.state.age:
            return False
        if not state.back_to:
            self._become(state)
            return False
        if spec_of(state.back_to) is None:
            return False  # from another release, or not installed
        by, term = "the end of a trial whose scheduler is gone", max(term, state.term)
        self._become(PolicyState(state.back_to, time.time(), by, term, state.switches + 1))
        return True

    def follow(self, state: PolicyState | None) -> None:
        """Adopt the scheduler's state, unless this process knows a later switch."""
        if state is not None and state.age >= self.state.age:
            self._become(state)

    def _become(self, state: PolicyState) -> None:
        if spec_of(state.policy) is None:
            return  # from another release, or not installed
        before, self.state = self.state, state
        if state.policy != before.policy:
            for listener in self.listeners:
                listener(self.policy)
