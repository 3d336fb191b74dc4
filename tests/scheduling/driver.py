"""A scheduler with its clock, driven event by event."""

from __future__ import annotations

from sglang_sbs.scheduling import (
    Dispatch,
    ForwardEnded,
    InstanceUp,
    Refuse,
    RequestArrived,
    Scheduler,
    SchedulerConfig,
    TimerFired,
    WakeAt,
)
from sglang_sbs.wire import EndForward


class Driver:
    """A scheduler with its clock, collecting commands by kind."""

    def __init__(self, **config):
        self.scheduler = Scheduler(SchedulerConfig(**config))
        self.now_s = 100.0
        self.dispatched: list[Dispatch] = []
        self.refused: list[Refuse] = []
        self.wake_s: float | None = None
        self._seq: dict[tuple[str, int], int] = {}

    def tell(self, event) -> list[Dispatch]:
        new = []
        for command in self.scheduler.handle(event, self.now_s):
            match command:
                case Dispatch():
                    new.append(command)
                case Refuse():
                    self.refused.append(command)
                case WakeAt():
                    self.wake_s = command.time_s
        self.dispatched += new
        return new

    def up(self, prefill: int = 1, dp: int = 2, chunk: int = 1000, decode_dp: int = 2, **decode):
        for i in range(prefill):
            self.tell(InstanceUp(instance=f"p{i}", role="prefill", dp_size=dp, chunk_tokens=chunk))
        self.tell(InstanceUp(instance="d0", role="decode", dp_size=decode_dp, **decode))
        return self

    def arrive(self, rid: str, tokens: int = 100, **more) -> list[Dispatch]:
        return self.tell(RequestArrived(rid=rid, prompt_tokens=tokens, **more))

    def wait(self, seconds: float) -> list[Dispatch]:
        """Let time pass, firing timers when they are due."""
        end_s = self.now_s + seconds
        new = []
        while self.wake_s is not None and self.wake_s <= end_s:
            self.now_s = max(self.now_s, self.wake_s)
            self.wake_s = None
            new += self.tell(TimerFired())
        self.now_s = end_s
        return new

    def report(self, instance: str, rank: int = 0, dp: int = 2, **fields) -> list[Dispatch]:
        key = (instance, rank)
        seq = fields.pop("seq", None)
        if seq is None:
            seq = self._seq.get(key, -1) + 1
        self._seq[key] = max(seq, self._seq.get(key, -1))
        base = {
            "instance_id": instance,
            "boot_id": "boot",
            "role": "decode" if instance.startswith("d") else "prefill",
            "dp_rank": rank,
            "dp_size": dp,
            "seq": seq,
            "kind": "forward",
        }
        return self.tell(ForwardEnded(instance=instance, report=EndForward(**{**base, **fields})))

    def prefill_state(self, instance: str = "p0"):
        state = self.scheduler.snapshot(self.now_s)
        return next(p for p in state.prefill if p.instance == instance)
