"""The scheduler: decides when each request is dispatched, and to which prefill and decode DP ranks.
Does no I/O (:mod:`.scheduler`)."""

from sglang_sbs.scheduling.config import DECODE_RULES as DECODE_RULES
from sglang_sbs.scheduling.config import TRIGGERS as TRIGGERS
from sglang_sbs.scheduling.config import SchedulerConfig as SchedulerConfig
from sglang_sbs.scheduling.events import *  # noqa: F403 - what goes in and out, all of it
from sglang_sbs.scheduling.policy_registry import policy_names as policy_names
from sglang_sbs.scheduling.scheduler import Scheduler as Scheduler
from sglang_sbs.scheduling.snapshot import Snapshot as Snapshot
