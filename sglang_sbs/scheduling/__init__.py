"""The policy: who leaves when, for which DP ranks. Sans-I/O, see ``scheduler``."""

from sglang_sbs.scheduling.config import DECODE_RULES, TRIGGERS, SchedulerConfig
from sglang_sbs.scheduling.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheTier,
    Command,
    Dispatch,
    Event,
    ForwardEnded,
    InstanceDown,
    InstanceUp,
    LoadPolled,
    PrefillDone,
    PrefixSource,
    Refuse,
    RequestAdopted,
    RequestArrived,
    RequestEnded,
    TimerFired,
    WakeAt,
)
from sglang_sbs.scheduling.policy_names import POLICIES
from sglang_sbs.scheduling.scheduler import Scheduler
from sglang_sbs.scheduling.snapshot import Snapshot

__all__ = [
    "DECODE_RULES",
    "POLICIES",
    "TRIGGERS",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "CacheTier",
    "Command",
    "Dispatch",
    "Event",
    "ForwardEnded",
    "InstanceDown",
    "InstanceUp",
    "LoadPolled",
    "PrefillDone",
    "PrefixSource",
    "Refuse",
    "RequestAdopted",
    "RequestArrived",
    "RequestEnded",
    "Scheduler",
    "SchedulerConfig",
    "Snapshot",
    "TimerFired",
    "WakeAt",
]
