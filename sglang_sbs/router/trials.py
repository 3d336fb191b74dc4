"""Runs a trial (:mod:`sglang_sbs.trial`) in the scheduler's process: executes its switches, reports
on it, and ends it if the policy is switched by anything else."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client.core import Metric

from sglang_sbs.router.dispatch.scheduler_driver import SchedulerPump
from sglang_sbs.router.metric_families import gauge
from sglang_sbs.router.policy_in_force import PolicyInForce, PolicyState
from sglang_sbs.scheduling.events import Command, Event, RequestArrived
from sglang_sbs.trial.report import TrialReport, report_of
from sglang_sbs.trial.spec import TrialSpec, read_object
from sglang_sbs.trial.trial import ARMS, Cause, Ended, Switch, Trial

logger = logging.getLogger(__name__)

TICK_S = 1.0
_BY = "a trial"
_LOST = "the scheduler that ran the trial is no longer active"


@dataclass(eq=False)
class Trials:
    """Runs at most one trial at a time. Use only from one event loop."""

    policy: PolicyInForce
    pump: SchedulerPump
    leads: Callable[[], bool] = lambda: True
    """Returns whether this process is the active scheduler."""
    term: Callable[[], int] = int
    switched: Callable[[], None] = lambda: None
    """Called after each switch of the policy by a trial."""
    _trial: Trial | None = None
    """The current or last trial."""
    _wanted: TrialSpec | None = None
    """Trial of ``--sbs-trial`` that begins with the first request."""
    _began_at: float = 0.0
    _ended_at: float | None = None
    _note: str = ""
    """Reason why a trial ended early or did not begin; empty without one."""
    _mine: PolicyState | None = None
    """Policy state set by the trial's last switch; another state in force means a foreign
    switch."""
    _timer: asyncio.TimerHandle | None = None
    _pass_s: float = 0.0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    @property
    def running(self) -> bool:
        return self._trial is not None and self._trial.ended is None

    # Requests of other parts ------------------------------------------------------------------

    def want(self, spec: TrialSpec | None) -> None:
        """Begin this trial (``--sbs-trial``) with the first request that arrives, unless the policy
        has been switched before. ``None``: no trial."""
        self._wanted = spec
        if spec is not None:
            self.pump.trial = self._waited_for

    def ask(self, do: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Execute ``begin`` (``body`` as in ``POST /trial``), ``end`` or ``show``, and return the
        report. Raises: ValueError, ``body`` is invalid or a trial is already running."""
        if do == "begin":
            spec = read_object(body)
            if self.running:
                raise ValueError("a trial is already running: DELETE /trial ends it")
            self.begin(spec)
        elif do == "end":
            self._wanted = None
            self.stop("stopped", "it was stopped")
        return self.shown() or {"running": False, "text": self._text()}

    def begin(self, spec: TrialSpec) -> None:
        """Begin a trial of the policy in force against the baseline of ``spec``. Must not be called
        while a trial runs."""
        self._wanted, self._note = None, ""
        seed = random.SystemRandom().randrange(2**31) if spec.seed is None else spec.seed
        self._trial = Trial(spec, self.policy.policy, seed)
        self._began_at, self._ended_at = time.time(), None
        self.pump.trial = self._observe
        logger.info("a trial begins: %s against %s, seed %d", *self._trial.policies, seed)
        self._take(self._trial.begin(time.monotonic()))
        if (shown := self._report()) is not None and shown.warning:
            logger.warning("%s", shown.warning)
        self._tick()

    def stop(self, cause: Cause, text: str) -> None:
        """End a running trial and restore the policy before it."""
        if self._trial is not None and self.running:
            self._take(self._trial.stop(cause, text))

    def inherited(self) -> None:
        """Report that another scheduler's trial was found and ended."""
        self._note = "the last trial ended early because its scheduler is gone"
        self._wanted = None
        logger.warning("%s: %s is in force", self._note, self.policy.policy)

    def close(self) -> None:
        self.stop("lost", _LOST)

    # While it runs ----------------------------------------------------------------------------

    def _waited_for(self, event: Event, commands: Sequence[Command], now_s: float) -> None:
        if isinstance(event, RequestArrived):
            self.pump.trial = None
            self._loop.call_soon(self._begin_wanted)

    def _begin_wanted(self) -> None:
        spec, self._wanted = self._wanted, None
        if spec is None:
            return
        if self.policy.state.switches:
            self._note = "the trial of --sbs-trial did not begin: the policy was switched before"
            logger.warning("%s", self._note)
        else:
            self.begin(spec)

    def _observe(self, event: Event, commands: Sequence[Command], now_s: float) -> None:
        """Pass events to the trial; its errors must not affect the scheduler."""
        trial = self._trial
        assert trial is not None
        try:
            trial.observe(event, commands, now_s)
        except Exception:
            logger.exception("the trial failed on %r", type(event).__name__)
            self.pump.trial = None  # the switch is a separate event
            self._loop.call_soon(self.stop, "failed", "a defect; the router's log has the cause")

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        trial, now_s = self._trial, time.monotonic()
        if trial is None or trial.ended is not None:
            return
        state = self.policy.state
        if not self.leads():
            self.stop("lost", _LOST)
        elif state is not self._mine:
            self.stop("switched", f"the policy was switched to {state.policy} by {state.by}")
        else:
            try:
                self._take(trial.advance(now_s))
            except Exception:
                logger.exception("the trial failed")
                self.stop("failed", "a defect; the router's log has the cause")
        if trial.ended is None:
            wait_s = min(TICK_S, max(0.0, trial.wake_s - now_s))
            self._timer = self._loop.call_later(wait_s, self._tick)

    def _take(self, steps: Sequence[Switch | Ended]) -> None:
        """Execute the trial's steps; skip its switches if the policy has been switched by anything
        else."""
        trial = self._trial
        assert trial is not None
        ended = trial.ended
        foreign = self._mine is not None and self.policy.state is not self._mine
        for step in steps:
            if isinstance(step, Switch) and not foreign:
                # A replaced process must not claim a later switch than its successor's.
                term = self.term() if self.leads() else self.policy.state.term
                back_to = "" if ended is not None else trial.policies[0]
                self.policy.switch(step.policy, _BY, term, back_to)
                self._mine = self.policy.state
                self.switched()
        if ended is not None:
            self._mine, self.pump.trial = None, None
            self._ended_at = time.time()
            logger.info("%s", self._text())

    # Shown ------------------------------------------------------------------------------------

    def _text(self) -> str:
        if self._wanted is not None:
            return f"a trial against {self._wanted.baseline} begins with the first request"
        report = self._report()
        return self._note or ("no trial has run" if report is None else report.text)

    def _report(self) -> TrialReport | None:
        if self._trial is None:
            return None
        interval = getattr(self.pump.scheduler, "interval", None)
        if self.running and interval is not None and interval.learned:
            self._pass_s = interval.mean_forward_s
        return report_of(self._trial, time.monotonic(), self._pass_s, self._began_at)

    def shown(self) -> dict[str, Any] | None:
        """Return the report of the current or last trial in JSON types; ``None`` if there was
        none."""
        report = self._report()
        if report is None:
            return None
        report.ended_at = self._ended_at
        found: dict[str, Any] = msgspec.to_builtins(report)
        return found

    def families(self) -> Iterator[Metric]:
        """Yield metrics of the current or last trial; without values if there was none."""
        report, trial = self._report(), self._trial
        bounds: dict[str, float] = {}
        now: dict[tuple[str, str], float] = {}
        requests: dict[str, float] = {}
        means_s: dict[str, float] = {}
        if report is not None and trial is not None:
            known = {"ratio": report.ratio, "low": report.low, "high": report.high}
            bounds = {bound: value for bound, value in known.items() if value is not None}
            for name, arm in zip(ARMS, trial.arms, strict=True):
                now[name, report.arms[name].policy] = name == report.now
                requests[name] = arm.requests
                if arm.requests:
                    means_s[name] = arm.ttft_s / arm.requests
        about = "Mean TTFT of the policy on trial over that of its baseline, 95 % interval"
        yield gauge("sbs_trial_ratio", about, bounds, "bound")
        about = "1 for the policy that has the present slot of a trial, else 0"
        yield gauge("sbs_trial_arm", about, now, "arm", "policy")
        yield gauge("sbs_trial_requests", "Requests counted in a trial", requests, "arm")
        about = "Mean time from arrival to prefill's response of these requests"
        yield gauge("sbs_trial_mean_ttft_seconds", about, means_s, "arm")
        done = None if trial is None else trial.done
        yield gauge("sbs_trial_slots", "Completed slots of a trial", done)
