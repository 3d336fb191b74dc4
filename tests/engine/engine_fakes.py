"""Scheduler, batch, request and result with the attribute shapes of SGLang 0.5.23.

Only what the hook reads, plus the order of the real event loops
(``disaggregation/prefill.py``, ``disaggregation/decode.py``): take requests in, form and launch a
batch, process the oldest result. Time is a counter that tests move.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sglang_sbs.engine.config import HookConfig
from sglang_sbs.engine.hooks import RankHook
from sglang_sbs.wire import EndForward, decode_endforward


class Mode(enum.IntEnum):
    """``model_executor/forward_batch_info.py``: ForwardMode."""

    EXTEND = 1
    DECODE = 2
    IDLE = 4
    TARGET_VERIFY = 5
    PREBUILT = 7

    def is_extend(self) -> bool:
        return self in (Mode.EXTEND, Mode.TARGET_VERIFY)

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_prebuilt(self) -> bool:
        return self is Mode.PREBUILT


class Role(enum.Enum):
    """``disaggregation/utils.py``: DisaggregationMode."""

    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Req:
    def __init__(self, rid: str, tokens: int, *, cached: int = 0) -> None:
        self.rid = rid
        self.origin_input_ids = [0] * tokens
        self.output_ids: list[int] = []
        self.prefix_len = 0
        self.extend_end: int | None = None
        self.cached = cached
        self.done = False

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self) -> bool:
        return self.done


class Batch:
    def __init__(self, mode: Mode, reqs: Sequence[Req], extend: int | None = None) -> None:
        self.forward_mode = mode
        self.reqs = list(reqs)
        self.extend_num_tokens = extend
        self.prefill_stats = SimpleNamespace(log_hit_tokens=sum(r.cached for r in reqs))
        self.global_num_tokens: list[int] | None = None
        self.forward_iter: int | None = None
        self.launch_ts: float | None = None


class Result:
    def __init__(self, copy_done: Any = None) -> None:
        self.copy_done = copy_done


class Event:
    """``copy_done``: synchronizing moves the clock to the end of the pass on the device."""

    def __init__(self, clock: Clock, end_s: float) -> None:
        self.clock, self.end_s = clock, end_s

    def synchronize(self) -> None:
        self.clock.now_s = max(self.clock.now_s, self.end_s)


class Scheduler:
    """One rank of a DP-attention engine whose passes take ``pass_s`` on a FIFO device."""

    def __init__(
        self, role: Role, clock: Clock, *, dp_rank: int = 1, dp_size: int = 2, chunk: int = 1024
    ) -> None:
        self.clock = clock
        self.disaggregation_mode = role
        self.ps = SimpleNamespace(
            dp_rank=None,
            dp_size=1,
            attn_dp_rank=dp_rank,
            attn_dp_size=dp_size,
            pp_rank=0,
            attn_tp_rank=0,
            attn_cp_rank=0,
        )
        self.chunked_prefill_size = chunk
        self.max_running_requests = 48
        self.max_total_num_tokens = 100_000
        self.kv_tokens = 0
        stats = SimpleNamespace(get_kv_token_stats=lambda: (self.kv_tokens, 0.0))
        self.pool_stats_observer = SimpleNamespace(get_pool_stats=lambda: stats)
        self.load_inquirer = SimpleNamespace(get_num_waiting_uncached_tokens=self._uncached)
        self.waiting_queue: list[Req] = []
        self.running_batch = Batch(Mode.DECODE, [])
        self.last_batch: Batch | None = None
        self.chunked_req: Req | None = None
        self.result_queue: deque[tuple[Batch, Result]] = deque()
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
        self.disagg_prefill_inflight_queue: list[Req] = []
        self.disagg_decode_prealloc_queue = SimpleNamespace(queue=[], retracted_queue=[])
        self.disagg_decode_transfer_queue = SimpleNamespace(queue=[])
        self.forward_ct = 0
        self.device_free_s = 0.0
        self.pass_s = 0.1
        self.launch_cpu_s = 0.001
        self.process_cpu_s = 0.004
        self.processed: list[tuple[Batch, Result]] = []

    def _uncached(self) -> int:
        """Count tokens like ``load_inquirer.py``: with the chunked request, including its chunk in
        flight."""
        if self.disaggregation_mode is Role.DECODE:
            return 0
        tokens = sum(r.seqlen - r.cached for r in self.waiting_queue)
        if self.chunked_req is not None:
            tokens += max(0, self.chunked_req.seqlen - self.chunked_req.prefix_len)
        return tokens

    def cut_batch(self) -> Batch | None:
        """PrefillAdder: the chunked request first, then FCFS up to the chunk."""
        room, reqs, extend = self.chunked_prefill_size, [], 0
        candidates = [self.chunked_req] if self.chunked_req is not None else []
        self.chunked_req = None
        while room > 0 and (candidates or self.waiting_queue):
            req = candidates.pop() if candidates else self.waiting_queue.pop(0)
            assert req is not None
            req.prefix_len = req.extend_end if req.extend_end is not None else req.cached
            take = min(room, req.seqlen - req.prefix_len)
            req.extend_end = req.prefix_len + take
            if req.extend_end < req.seqlen:
                self.chunked_req = req
            room, extend = room - take, extend + take
            reqs.append(req)
        return Batch(Mode.EXTEND, reqs, extend) if reqs else None

    # Targets of the hooks, as SGLang has them.

    def run_batch(self, batch: Batch, pp_proxy_tensors: Any = None) -> Result:
        self.forward_ct += 1
        batch.forward_iter = self.forward_ct
        batch.launch_ts = self.clock.now_s
        self.clock.now_s += self.launch_cpu_s
        start_s = max(batch.launch_ts, self.device_free_s)
        self.device_free_s = start_s + self.pass_s
        return Result(Event(self.clock, self.device_free_s))

    def process_batch_result(self, batch: Batch, result: Result) -> None:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        else:
            self.clock.now_s = max(self.clock.now_s, self.device_free_s)
        self.processed.append((batch, result))
        self.clock.now_s += self.process_cpu_s

    def on_idle(self) -> None:
        self.clock.now_s += 0.0001

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if req.seqlen > 90_000:
            return
        if self.disaggregation_mode is Role.PREFILL:
            self.disagg_prefill_bootstrap_queue.queue.append(req)
        elif self.disaggregation_mode is Role.DECODE:
            queue = self.disagg_decode_prealloc_queue
            if is_retracted:
                queue.retracted_queue.append(req)
            else:
                queue.queue.append(SimpleNamespace(req=req))
        else:
            self.waiting_queue.append(req)

    def abort_request(self, recv_req: Any) -> None:
        self.waiting_queue = [r for r in self.waiting_queue if not r.rid.startswith(recv_req.rid)]


class Sink:
    """Where the messages of one rank land; real frames, decoded."""

    def __init__(self) -> None:
        self.messages: list[EndForward] = []
        self.closed = False

    def send(self, frames: Sequence[bytes]) -> None:
        self.messages.append(decode_endforward(frames))

    def close(self) -> None:
        self.closed = True

    def of(self, kind: str) -> list[EndForward]:
        return [m for m in self.messages if m.kind == kind]


def config(**changes: Any) -> HookConfig:
    values: dict[str, Any] = {
        "routers": ("tcp://127.0.0.1:1",),
        "bind": None,
        "instance_id": "http://p0:30000",
        "boot_id": "boot-1",
    }
    return HookConfig(**(values | changes))


class Rank:
    """A scheduler with the hook around it, and the event loops that drive it."""

    def __init__(self, role: Role = Role.PREFILL, *, sink: Any = None, **kwargs: Any) -> None:
        self.clock = Clock()
        self.sink = sink if sink is not None else Sink()
        self.scheduler = Scheduler(role, self.clock, **kwargs)
        self.hook = RankHook(config(), open_sink=lambda _c, _d: self.sink, clock=self.clock)

    @property
    def messages(self) -> list[EndForward]:
        return self.sink.messages

    def run_batch(self, batch: Batch) -> Result:
        return self.hook.around_run_batch(Scheduler.run_batch, self.scheduler, batch)

    def process(self, batch: Batch, result: Result) -> None:
        self.hook.around_process_batch_result(
            Scheduler.process_batch_result, self.scheduler, batch, result
        )

    def idle(self) -> None:
        self.hook.before_on_idle(self.scheduler)
        self.scheduler.on_idle()

    def add(self, req: Req, **kwargs: Any) -> None:
        self.hook.around_add_request(Scheduler._add_request_to_queue, self.scheduler, req, **kwargs)

    def abort(self, rid: str, *, abort_all: bool = False) -> None:
        request = SimpleNamespace(rid=rid, abort_all=abort_all)
        self.hook.before_abort_request(self.scheduler, request)
        self.scheduler.abort_request(request)

    def bootstrapped(self) -> None:
        """The handshake with decode is done for all."""
        queue = self.scheduler.disagg_prefill_bootstrap_queue.queue
        self.scheduler.waiting_queue += queue
        queue.clear()

    def overlap_turn(self, batch: Batch | None) -> None:
        """One turn of ``event_loop_overlap_disagg_*``."""
        s = self.scheduler
        if batch is not None:
            s.result_queue.append((batch, self.run_batch(batch)))
        if s.last_batch is not None:
            self.process(*s.result_queue.popleft())
        elif batch is None:
            self.idle()
        s.last_batch = batch

    def normal_turn(self, batch: Batch | None) -> None:
        """One turn of ``event_loop_normal_disagg_*``: the result has no ``copy_done``."""
        if batch is not None:
            result = self.run_batch(batch)
            result.copy_done = None
            self.process(batch, result)
        else:
            self.idle()
        self.scheduler.last_batch = batch
