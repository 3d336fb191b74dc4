"""A scheduler whose decisions are read back with their reasons."""

from __future__ import annotations

import random

from model_engine import PrefillEngine

from sglang_sbs.scheduling import (
    Dispatch,
    ForwardEnded,
    InstanceUp,
    PrefillDone,
    RequestArrived,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
    TimerFired,
    WakeAt,
)


class Cluster:
    """Engines that tell the truth, and a record of every event."""

    def __init__(self, seed: int, **config):
        self.config = SchedulerConfig(t_default_s=0.2, **config)
        self.scheduler = Scheduler(self.config, remembers=10_000)
        self.engines = {f"p{n}": PrefillEngine(f"p{n}", 2, 1000) for n in range(3)}
        self.random = random.Random(seed)
        self.now_s = 10.0
        self.events = []
        self.sent: list[Dispatch] = []
        self.tokens: dict[str, int] = {}
        self.unexplained: list[str] = []
        self._timers: list[tuple[float, int, object]] = []
        self._wake_s = float("inf")
        for name in self.engines:
            self.tell(InstanceUp(instance=name, role="prefill", dp_size=2, chunk_tokens=1000))
        decode = {"dp_size": 2, "kv_capacity_tokens": 40_000}
        self.tell(InstanceUp(instance="d0", role="decode", **decode))

    def tell(self, event):
        self.events.append((self.now_s, event))
        for command in self.scheduler.handle(event, self.now_s):
            if isinstance(command, Dispatch):
                self.sent.append(command)
                at_s = self.now_s + 0.005
                self.at(at_s, lambda sent=command: self.deliver(sent))
            elif isinstance(command, WakeAt):
                self._wake_s = command.time_s
        for request in self.scheduler.queue:
            if not self.scheduler.why(request.rid, self.now_s + 1e-6).waits:
                self.unexplained.append(request.rid)

    def at(self, time_s, action):
        self._timers.append((time_s, len(self.events) + len(self._timers), action))

    def deliver(self, sent):
        engine = self.engines[sent.prefill]
        engine.accept(sent.rid, sent.prefill_rank, self.tokens[sent.rid])
        self.launch(engine)

    def launch(self, engine):
        if engine.running is None and engine.has_work:
            for message in engine.launch():
                self.tell(ForwardEnded(instance=engine.name, report=message))
            self.at(self.now_s + engine.forward_s, lambda: self.finish(engine))

    def finish(self, engine):
        done, messages = engine.finish()
        for message in messages:
            self.tell(ForwardEnded(instance=engine.name, report=message))
        for rid in done:
            self.tell(PrefillDone(rid=rid))
            self.tell(RequestEnded(rid=rid, outcome="completed", completion_tokens=8))
        self.launch(engine)

    def run(self, requests: int):
        for number in range(requests):
            at_s = self.now_s + self.random.uniform(0, requests / 40)
            tokens = self.random.choice([50, 200, 400, 900, 2500])
            self.tokens[f"r{number}"] = tokens
            arrival = RequestArrived(rid=f"r{number}", prompt_tokens=tokens, max_new_tokens=10)
            self.at(at_s, lambda arrival=arrival: self.tell(arrival))
        while self._timers or self.scheduler.queue:
            next_s = min([timer[0] for timer in self._timers], default=float("inf"))
            if self._wake_s < next_s:
                self.now_s, self._wake_s = max(self.now_s, self._wake_s), float("inf")
                self.tell(TimerFired())
                continue
            self._timers.sort()
            self.now_s, _, action = self._timers.pop(0)
            action()
        return self
