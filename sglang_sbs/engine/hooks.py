"""The hooks in SGLang's scheduler loop, which decide when a DP rank sends a message.

Order within one pass (``managers/scheduler.py``, ``disaggregation/{prefill,decode}.py``)::

    run_batch(k)               around: note the pass, send ``launch`` (prefill)
    process_batch_result(k)    around: wait for the pass as SGLang is about to, send
                               ``forward``, then let SGLang process the result
    on_idle()                  before: send ``idle`` once, then changes and heartbeats

Errors in here are counted, never raised; after ``MAX_ERRORS`` in an hour the hook is off."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang_sbs.engine import collect
from sglang_sbs.engine.collect import LaunchedPass, SchedulerReader
from sglang_sbs.engine.config import HookConfig, join_tcp, split_tcp
from sglang_sbs.engine.publish import BindError, Publisher
from sglang_sbs.engine.recent_errors import RecentErrors
from sglang_sbs.wire.endforward import (
    MAX_RIDS,
    Accepted,
    Kind,
    KvAddress,
    Started,
    encode_endforward,
)

logger = logging.getLogger(__name__)

MAX_ERRORS = 20
CHANGE_SHARE = 0.25
"""Share of the usual interval between decode messages that applies when the running set changes."""
CHANGE_INTERVAL_S = 0.01
"""Least seconds between two reports of state changes outside of passes."""
_OF_PASS = [name for name in LaunchedPass._fields if name not in ("is_extend", "finished")]
"""Names of the fields of a pass that are also fields of a message."""
_NO_PASS = LaunchedPass(0, "idle", 0.0, 0, 0, 0, None, False)
"""Pass in messages of a rank that has run none."""
Original = Callable[..., Any]


def open_publisher(config: HookConfig, dp_rank: int) -> Publisher:
    """Open a rank's publisher. Raises: BindError."""
    bind = None
    if config.bind is not None:
        host, port = split_tcp(config.bind)
        bind = join_tcp(host, port + dp_rank)
    return Publisher(config.routers, bind, keys=config.keys, source=config.node_host)


class RankHook:
    """The hook of one scheduler process. All methods run on the scheduler's thread."""

    def __init__(
        self,
        config: HookConfig,
        *,
        open_sink: Callable[[HookConfig, int], Publisher] = open_publisher,
        clock: Callable[[], float] = time.monotonic,
        gang_gate: Callable[[], str] = lambda: "",
    ) -> None:
        self._config = config
        self._gang_gate = gang_gate
        self._open_sink = open_sink
        self._clock = clock
        self.off = False
        self.errors = RecentErrors(MAX_ERRORS)
        self._reader: SchedulerReader | None = None
        self._sink: Publisher | None = None
        self._accepted: list[Accepted] = []
        """Accepted requests not reported yet."""
        self._processing: Any = None
        """The result that SGLang is processing."""
        # The last completed pass, and the last message.
        self._pass = _NO_PASS
        self._end_s = 0.0
        self._forward_s = 0.0
        self._sent_s = float("-inf")
        self._sent_counts: tuple[int, ...] = ()
        self._reported_idle = False

    def close(self) -> None:
        self.off = True
        if self._sink is not None:
            self._sink.close()

    # Hooks --------------------------------------------------------------------------------

    def around_run_batch(
        self, original: Original, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook around ``Scheduler.run_batch(self, batch, pp_proxy_tensors=None)``."""
        entered_s = self._clock()
        result = original(scheduler, batch, *args, **kwargs)
        self._safely(self._on_launch, scheduler, batch, result, entered_s)
        return result

    def around_process_batch_result(
        self, original: Original, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook around ``Scheduler.process_batch_result(self, batch, result)``. In 0.5.10 that calls
        ``process_batch_result_disagg_prefill``, which is hooked as well for earlier releases: the
        outer call counts.

        With ``copy_done``, waiting for it here is what the original does first, so the message
        leaves before the CPU work on the result. Without it (overlap disabled), the message follows
        the original."""
        if self.off or (result is not None and result is self._processing):
            return original(scheduler, batch, result, *args, **kwargs)
        pending = self._safely(self._on_result, scheduler, batch, result) is False
        self._processing = result
        try:
            returned = original(scheduler, batch, result, *args, **kwargs)
        finally:
            self._processing = None
        if pending:
            self._safely(self._on_end, scheduler, batch, result)
        return returned

    def before_on_idle(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        """Hook before ``Scheduler.on_idle(self)``, through which the loop spins or in which a
        plugin sleeps. It runs before, so that ``idle`` is sent before such a sleep."""
        self._safely(self._on_idle, scheduler)

    def around_add_request(
        self, original: Original, scheduler: Any, req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook around ``Scheduler._add_request_to_queue(self, req, is_retracted=False)``."""
        returned = original(scheduler, req, *args, **kwargs)
        self._safely(self._on_added, scheduler, req)
        return returned

    def before_abort_request(
        self, scheduler: Any, recv_req: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        """Hook before ``Scheduler.abort_request(self, recv_req)``, which removes the requests that
        this hook counts."""
        self._safely(self._on_abort, scheduler, recv_req)

    def _safely(self, act: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        """Run ``act(reader, *args)``; None if it failed or this process does not report."""
        if self.off:
            return None
        try:
            reader = self._attached(scheduler)
            return None if reader is None else act(reader, *args)
        except Exception:
            self._failed()
            return None

    # Effects of the hooks -----------------------------------------------------------------

    def _on_launch(
        self, reader: SchedulerReader, batch: Any, result: Any, entered_s: float
    ) -> None:
        if batch.forward_mode.is_prebuilt():
            return
        launched = collect.read_pass(reader.scheduler, batch, entered_s, reader.placement.dp_size)
        if reader.is_spin(launched):
            return
        collect.note_pass(result, launched)
        role = collect.read_role(reader.scheduler)
        if role == "prefill" or (role == "null" and launched.is_extend):
            begun_s = self._clock()
            started = collect.newly_started(batch) if launched.is_extend else []
            self._send("launch", reader.count(), launched, begun_s, started)

    def _on_result(self, reader: SchedulerReader, batch: Any, result: Any) -> bool:
        """Report the end of a pass; return False if it is not known yet."""
        if batch.forward_mode.is_prebuilt():
            return True
        done = getattr(result, "copy_done", None)
        if done is None:
            return False
        done.synchronize()
        self._on_end(reader, batch, result)
        return True

    def _on_end(self, reader: SchedulerReader, batch: Any, result: Any) -> None:
        ended, end_s = collect.noted_pass(result), self._clock()
        if ended is None:  # pipeline stages rebuild the result, so use the batch
            ended = collect.read_pass(reader.scheduler, batch, self._end_s, reader.draft.dp_size)
        if reader.is_spin(ended):
            self._on_idle(reader)
            return
        self._forward_s = max(0.0, end_s - max(ended.launch_s, self._end_s))
        self._end_s = end_s
        self._pass = ended
        self._reported_idle = False
        reader.draft.computed_tokens += ended.extend_tokens
        counts = reader.count()
        if reader.draft.role != "prefill" and not ended.is_extend:
            # Decode passes are short: send at most one message per interval, sooner on a change.
            share = CHANGE_SHARE if counts != self._sent_counts else 1
            if end_s - self._sent_s < self._config.decode_interval_s * share:
                return
        self._send("forward", counts, ended, end_s)

    def _on_idle(self, reader: SchedulerReader) -> None:
        now_s, counts = self._clock(), reader.count()
        idle = reader.is_quiescent()
        if idle and not self._reported_idle:
            self._send("idle", counts, self._pass, now_s)
        else:
            changed = counts != self._sent_counts
            if now_s - self._sent_s >= (CHANGE_INTERVAL_S if changed else self._config.heartbeat_s):
                self._send("heartbeat", counts, self._pass, now_s)
        self._reported_idle = idle

    def _on_added(self, reader: SchedulerReader, req: Any) -> None:
        role = collect.read_role(reader.scheduler)
        if reader.accepted(req, role):
            reader.draft.accepted_requests += 1
            reader.draft.accepted_tokens += len(req.origin_input_ids)
            self._accepted.append(collect.describe_accepted(req, role, self._clock()))

    def _on_abort(self, reader: SchedulerReader, recv_req: Any) -> None:
        aborted = reader.newly_aborted(recv_req, collect.read_role(reader.scheduler))
        reader.draft.aborted_requests += aborted

    # Sending ------------------------------------------------------------------------------

    def _attached(self, scheduler: Any) -> SchedulerReader | None:
        """Return the reader, or None if this process does not report. It is created on first use,
        because the rank of this process is known only then."""
        if self._reader is None and not self.off:
            reader = SchedulerReader(scheduler)
            if not reader.placement.emits:
                self.off = True
                return None
            draft, config = reader.draft, self._config
            self._sink = self._open_sink(config, draft.dp_rank)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                draft.sglang_version = importlib.metadata.version("sglang")
            self._reader = reader
            draft.instance_id, draft.boot_id = config.instance_id, config.boot_id
            draft.barrier = draft.dp_size == 1 or reader.placement.barrier
            draft.dist_init_addr = collect.read_dist_init_addr(scheduler)
            kv = collect.read_kv_address(scheduler)
            if kv is not None:
                draft.kv_address = KvAddress(config.node_host or kv.host, kv.port, kv.replay_port)
            rank, routers = draft.dp_rank, ", ".join(config.routers)
            where = f"to {routers}" if routers else f"on the port of {config.bind} + {rank}"
            text = "EndForward of dp rank %d/%d, boot id %s, %s"
            logger.info(text, rank, draft.dp_size, draft.boot_id, where)
            if reader.missing:
                text = "SGLang %s does not provide %s; EndForward reports 0 for it"
                version = draft.sglang_version or "(unknown version)"
                logger.warning(text, version, ", ".join(reader.missing))
        return self._reader

    def _send(
        self,
        kind: Kind,
        counts: tuple[int, ...],
        reported: LaunchedPass,
        begun_s: float,
        started: Sequence[Started] = (),
    ) -> None:
        """Build and send one message; ``begun_s`` is the time when building it began."""
        assert self._reader is not None and self._sink is not None
        draft, now_s = self._reader.backlog(self._reader.draft.role), self._clock()
        for name in _OF_PASS:
            setattr(draft, name, getattr(reported, name))
        launch = kind == "launch"
        draft.kind = kind
        draft.end_s, draft.forward_s = (0.0, 0.0) if launch else (self._end_s, self._forward_s)
        since_s = draft.launch_s if launch else draft.end_s
        draft.age_s = 0.0 if reported is _NO_PASS else now_s - since_s
        draft.sent_s = now_s
        draft.accepted = accepted = self._accepted[:MAX_RIDS]
        draft.rids = [request.rid for request in accepted]
        draft.started = list(started[:MAX_RIDS])
        draft.finished = list(reported.finished[:MAX_RIDS]) if kind == "forward" else []
        draft.hook_errors, draft.gang_gate = self.errors.count, self._gang_gate()
        self._sink.send(encode_endforward(draft))
        draft.seq += 1
        del self._accepted[:MAX_RIDS]
        self._sent_s, self._sent_counts = now_s, counts
        draft.hook_us = int((self._clock() - begun_s) * 1e6)

    def _failed(self) -> None:
        error = sys.exc_info()[1]
        self.errors.add(self._clock())
        if isinstance(error, BindError):
            self._turn_off(str(error))
        elif self.errors.too_many:
            self._turn_off(f"{MAX_ERRORS} errors within an hour, the last one: {error!r}")
        elif self.errors.count == 1:
            logger.warning("EndForward hook: first error (the engine goes on)", exc_info=True)

    def _turn_off(self, why: str) -> None:
        logger.error("EndForward is off on this rank: %s", why)
        self.close()
