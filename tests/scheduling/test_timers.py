"""The scheduler's wake-up: one time at most is asked of the driver, and none is lost."""

from __future__ import annotations

import math

from sglang_sbs.scheduling import Command, WakeAt
from sglang_sbs.scheduling.timers import Replan, Timers


def test_a_later_planning_does_not_replace_an_earlier_one() -> None:
    timers, out = Timers(), list[Command]()
    for time_s in (5.0, 7.0, 3.0, 3.0, math.inf):
        timers.plan_by(time_s, out)
    assert out == [WakeAt(time_s=5.0), WakeAt(time_s=3.0)]
    assert timers.plan_s == 3.0


def test_the_same_time_is_requested_again_only_after_the_timer_fired() -> None:
    timers, out = Timers(), list[Command]()
    timers.plan_at(5.0, out)
    timers.plan_at(5.0, out)
    assert timers.fired(4.0, unfinished=False) is Replan.NOW
    timers.plan_at(5.0, out)
    assert out == [WakeAt(time_s=5.0)] * 2


def test_a_wake_up_for_unfinished_work_leaves_the_planning_due() -> None:
    timers, out = Timers(), list[Command]()
    timers.plan_at(5.0, out)
    timers.go_on(4.0, out)
    assert timers.fired(4.001, unfinished=True) is Replan.NO
    timers.go_on(4.9999, out)
    assert [round(command.time_s, 3) for command in out if isinstance(command, WakeAt)] == [
        *(5.0, 4.001, 5.0)
    ]
    assert timers.fired(5.0, unfinished=True) is Replan.NOW


def test_an_event_that_starts_nothing_asks_for_no_wake_up() -> None:
    timers, out = Timers(), list[Command]()
    timers.plan_by(10.0 + Replan.NO, out)
    assert out == []
