"""When a DP rank says what: the hooks in SGLang's scheduler loop.

Order within one pass (``managers/scheduler.py``, ``disaggregation/{prefill,decode}.py``)::

    run_batch(k)                   around: note the pass, send ``launch`` (prefill)
    process_batch_result(k)        around: wait for the pass as SGLang is about to, send
                                   ``forward``, then let SGLang process the result
    on_idle()                      before: send ``idle`` once, then changes and heartbeats

Whatever goes wrong in here is counted, never raised; after ``MAX_ERRORS`` the hook is off.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sglang_sbs.engine import collect
from sglang_sbs.engine.collect import Occupancy, Pass, Role, SchedulerReader
from sglang_sbs.engine.config import KEY_FILE, HookConfig, join_tcp, split_tcp
from sglang_sbs.wire.endforward import (
    MAX_RIDS,
    EndForward,
    Kind,
    KvAddress,
    Started,
    encode_endforward,
)

logger = logging.getLogger(__name__)

MAX_ERRORS = 20
CHANGE_SHARE = 0.25
"""A change of the running set shortens the interval between decode messages to this share."""
CHANGE_INTERVAL_S = 0.01
"""A change of state outside of passes is reported at most this often."""
LOG_EVERY = 1000
"""Messages between two debug lines about the hook's own cost."""
_NO_PASS = Pass(0, "idle", 0.0, False, False, 0, 0, 0, None)
"""In messages of a rank that has made none."""


class FrameSink(Protocol):
    """Where messages go: ``publish.Publisher``, or a list in tests."""

    def send(self, frames: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


OpenSink = Callable[[HookConfig, int], FrameSink]


def open_publisher(config: HookConfig, dp_rank: int) -> FrameSink:
    """The real sink. ZeroMQ is imported here, in ranks that send, and nowhere else."""
    from sglang_sbs.engine.publish import BindError, Publisher
    from sglang_sbs.wire.curve import SecretError, keys_of

    bind = None
    if config.bind is not None:
        host, port = split_tcp(config.bind)
        bind = join_tcp(host, port + dp_rank)
    try:
        keys = keys_of(config.secret) if config.secret else None
    except SecretError as error:
        raise BindError(f"{KEY_FILE}: {error}") from error
    return Publisher(config.routers, bind, keys=keys, source=config.node_host)


class RankHook:
    """The hook of one scheduler process. All methods run on the scheduler's thread."""

    def __init__(
        self,
        config: HookConfig,
        *,
        open_sink: OpenSink = open_publisher,
        clock: Callable[[], float] = time.monotonic,
        gang_gate: Callable[[], str] = lambda: "",
    ) -> None:
        """``gang_gate``: the field of that name."""
        self._config = config
        self._gang_gate = gang_gate
        self._open_sink = open_sink
        self._clock = clock
        self.off = False
        self.errors = 0
        self._reader: SchedulerReader | None = None
        self._barrier = True
        """A rank alone is its own barrier."""
        self._sink: FrameSink | None = None
        self._sglang_version = ""
        self._kv_address: KvAddress | None = None
        self._dist_init_addr = ""
        # What this rank counted since it started.
        self._seq = 0
        self._accepted_requests = 0
        self._accepted_tokens = 0
        self._computed_tokens = 0
        self._aborted_requests = 0
        self._rids: list[str] = []
        self._processing: Any = None
        """The result SGLang is working on."""
        # The last pass that ended, and the last message.
        self._pass: Pass | None = None
        self._end_s = 0.0
        self._forward_s = 0.0
        self._sent_s = float("-inf")
        self._sent_change: tuple[Occupancy, int, int] | None = None
        self._said_idle = False
        self._hook_us = 0
        self._total_us = 0
        self._max_us = 0

    def close(self) -> None:
        """Say nothing from now on."""
        self.off = True
        if self._sink is not None:
            self._sink.close()

    # Hooks --------------------------------------------------------------------------------

    def around_run_batch(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around ``Scheduler.run_batch(self, batch, pp_proxy_tensors=None)``."""
        entered_s = self._clock()
        result = original(scheduler, batch, *args, **kwargs)
        self._safely(self._on_launch, scheduler, batch, result, entered_s)
        return result

    def around_process_batch_result(
        self,
        original: Callable[..., Any],
        scheduler: Any,
        batch: Any,
        result: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Around ``Scheduler.process_batch_result(self, batch, result)``.

        In 0.5.10 it calls ``process_batch_result_disagg_prefill``, which is hooked too there, as
        releases before call that one instead: only the outer of the two counts.

        With ``copy_done``, waiting for it here is what the original does first; the message then
        leaves before the CPU work on the result. Without (overlap disabled), the original itself
        waits for the device, and the message follows it.
        """
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
        """Before ``Scheduler.on_idle(self)``: the loop spins through it, or a plugin sleeps in it.

        Before rather than after, so that ``idle`` leaves before such a sleep.
        """
        self._safely(self._on_idle, scheduler)

    def around_add_request(
        self, original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around ``Scheduler._add_request_to_queue(self, req, is_retracted=False)``."""
        returned = original(scheduler, req, *args, **kwargs)
        self._safely(self._on_added, scheduler, req)
        return returned

    def before_abort_request(
        self, scheduler: Any, recv_req: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        """Before ``Scheduler.abort_request(self, recv_req)``, while its targets are in place."""
        self._safely(self._on_abort, scheduler, recv_req)

    def _safely(self, act: Callable[..., Any], *args: Any) -> Any:
        if self.off:
            return None
        try:
            return act(*args)
        except Exception:
            self._failed()
            return None

    # What they do -------------------------------------------------------------------------

    def _on_launch(self, scheduler: Any, batch: Any, result: Any, entered_s: float) -> None:
        reader = self._attached(scheduler)
        if reader is None:
            return
        launched = collect.read_pass(scheduler, batch, entered_s, reader.placement.dp_size)
        if launched.is_prebuilt or self._is_spin(launched):
            return
        collect.note_pass(result, launched)
        role = collect.read_role(scheduler)
        if role == "prefill" or (role == "null" and launched.is_extend):
            begun_s = self._clock()
            started = collect.newly_started(batch) if launched.is_extend else []
            self._send("launch", role, reader.occupancy(role), launched, begun_s, started)

    def _on_result(self, scheduler: Any, batch: Any, result: Any) -> bool:
        """Returns False when the end of the pass is not known yet."""
        reader = self._attached(scheduler)
        if reader is None or batch.forward_mode.is_prebuilt():
            return True
        done = getattr(result, "copy_done", None)
        if done is None:
            return False
        done.synchronize()
        self._on_end(scheduler, batch, result)
        return True

    def _on_end(self, scheduler: Any, batch: Any, result: Any) -> None:
        reader = self._attached(scheduler)
        if reader is None:
            return
        ended, end_s = collect.noted_pass(result), self._clock()
        if ended is None:  # pipeline stages rebuild the result: the batch itself tells
            ended = collect.read_pass(scheduler, batch, self._end_s, reader.placement.dp_size)
        if self._is_spin(ended):
            self._on_idle(scheduler)
            return
        self._forward_s = max(0.0, end_s - max(ended.launch_s, self._end_s))
        self._end_s = end_s
        self._pass = ended
        self._computed_tokens += ended.extend_tokens
        self._said_idle = False
        role = collect.read_role(scheduler)
        occupancy = reader.occupancy(role)
        if role != "prefill" and not ended.is_extend:
            # Decode passes are short: at most one message per interval, sooner on a change.
            since_s = end_s - self._sent_s
            changed = self._change(occupancy) != self._sent_change
            if since_s < self._config.decode_interval_s * (CHANGE_SHARE if changed else 1):
                return
        self._send("forward", role, occupancy, ended, end_s)

    def _on_idle(self, scheduler: Any) -> None:
        reader = self._attached(scheduler)
        if reader is None:
            return
        now_s = self._clock()
        role = collect.read_role(scheduler)
        occupancy = reader.occupancy(role)
        idle = collect.is_quiescent(occupancy, role)
        if idle and not self._said_idle:
            self._send("idle", role, occupancy, self._pass, now_s)
        else:
            changed = self._change(occupancy) != self._sent_change
            if now_s - self._sent_s >= (CHANGE_INTERVAL_S if changed else self._config.heartbeat_s):
                self._send("heartbeat", role, occupancy, self._pass, now_s)
        self._said_idle = idle

    def _is_spin(self, one: Pass) -> bool:
        """Whether it is no pass but a turn of an idle rank: without a barrier (and without DWDP)
        SGLang gives it an empty batch in each (``dp_attn.py``: ``need_idle_batch``)."""
        return not self._barrier and one.mode == "idle"

    def _on_added(self, scheduler: Any, req: Any) -> None:
        reader = self._attached(scheduler)
        if reader is not None and reader.accepted(req, collect.read_role(scheduler)):
            self._accepted_requests += 1
            self._accepted_tokens += len(req.origin_input_ids)
            self._rids.append(collect.sent_rid(req))

    def _on_abort(self, scheduler: Any, recv_req: Any) -> None:
        reader = self._attached(scheduler)
        if reader is not None:
            self._aborted_requests += reader.newly_aborted(recv_req, collect.read_role(scheduler))

    def _change(self, occupancy: Occupancy) -> tuple[Occupancy, int, int]:
        return occupancy, self._accepted_requests, self._aborted_requests

    # Sending ------------------------------------------------------------------------------

    def _attached(self, scheduler: Any) -> SchedulerReader | None:
        """Set up on first use: only now is the rank of this process known."""
        if self._reader is None and not self.off:
            reader = SchedulerReader(scheduler)
            if not reader.placement.emits:
                self.off = True
                return None
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                self._sglang_version = importlib.metadata.version("sglang")
            self._sink = self._open_sink(self._config, reader.placement.dp_rank)
            self._reader = reader
            self._barrier = reader.placement.dp_size == 1 or collect.shares_barrier(scheduler)
            self._dist_init_addr = collect.read_dist_init_addr(scheduler)
            kv = collect.read_kv_address(scheduler)
            if kv is not None:
                host = self._config.node_host or kv.host
                self._kv_address = KvAddress(host, kv.port, kv.replay_port)
            rank, routers = reader.placement.dp_rank, ", ".join(self._config.routers)
            where = f"to {routers}" if routers else f"on the port of {self._config.bind} + {rank}"
            ranks, boot_id = reader.placement.dp_size, self._config.boot_id
            logger.info("EndForward of dp rank %d/%d, boot id %s, %s", rank, ranks, boot_id, where)
            if reader.missing:
                said = "SGLang %s does not give %s; EndForward says 0 for it"
                version = self._sglang_version or "(unknown version)"
                logger.warning(said, version, ", ".join(reader.missing))
        return self._reader

    def _send(
        self,
        kind: Kind,
        role: Role,
        occupancy: Occupancy,
        reported: Pass | None,
        begun_s: float,
        started: Sequence[Started] = (),
    ) -> None:
        """Make and send one message; ``begun_s`` is when its making began."""
        assert self._reader is not None and self._sink is not None
        backlog, now_s = self._reader.backlog(role), self._clock()
        limits, placement = self._reader.limits, self._reader.placement
        launch, of_pass = kind == "launch", reported or _NO_PASS
        end_s = 0.0 if launch else self._end_s
        counts = occupancy._asdict() | backlog._asdict() | limits._asdict()
        del counts["chunking"]
        message = EndForward(
            instance_id=self._config.instance_id,
            boot_id=self._config.boot_id,
            role=role,
            dp_rank=placement.dp_rank,
            dp_size=placement.dp_size,
            seq=self._seq,
            kind=kind,
            forward_id=of_pass.forward_id,
            mode=of_pass.mode,
            launch_s=of_pass.launch_s,
            end_s=end_s,
            age_s=now_s - (of_pass.launch_s if launch else end_s) if reported else 0.0,
            forward_s=0.0 if launch else self._forward_s,
            extend_tokens=of_pass.extend_tokens,
            cached_tokens=of_pass.cached_tokens,
            batch_size=of_pass.batch_size,
            tokens_per_rank=of_pass.tokens_per_rank,
            **counts,
            accepted_requests=self._accepted_requests,
            accepted_tokens=self._accepted_tokens,
            computed_tokens=self._computed_tokens,
            aborted_requests=self._aborted_requests,
            rids=self._rids[:MAX_RIDS],
            hook_errors=self.errors,
            sglang_version=self._sglang_version,
            hook_us=self._hook_us,
            started=list(started[:MAX_RIDS]),
            barrier=self._barrier,
            kv_address=self._kv_address,
            gang_gate=self._gang_gate(),
            dist_init_addr=self._dist_init_addr,
        )
        self._sink.send(encode_endforward(message))
        self._seq += 1
        del self._rids[:MAX_RIDS]
        self._sent_s = now_s
        self._sent_change = self._change(occupancy)
        self._measure(begun_s)

    def _measure(self, begun_s: float) -> None:
        self._hook_us = int((self._clock() - begun_s) * 1e6)
        self._total_us += self._hook_us
        self._max_us = max(self._max_us, self._hook_us)
        if self._seq % LOG_EVERY == 0:
            said = "EndForward hook: %d messages, mean %.0f us, max %d us"
            logger.debug(said, self._seq, self._total_us / self._seq, self._max_us)

    def _failed(self) -> None:
        """Called while handling an exception of ours."""
        from sglang_sbs.engine.publish import BindError

        error = sys.exc_info()[1]
        self.errors += 1
        if isinstance(error, BindError):
            self._turn_off(str(error))
        elif self.errors >= MAX_ERRORS:
            self._turn_off(f"{MAX_ERRORS} errors, the last one: {error!r}")
        elif self.errors == 1:
            logger.warning("EndForward hook: first error (the engine goes on)", exc_info=True)

    def _turn_off(self, why: str) -> None:
        logger.error("EndForward is off on this rank: %s", why)
        self.close()
