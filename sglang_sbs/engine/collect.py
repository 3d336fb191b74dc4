"""Reads the fields of EndForward from SGLang's scheduler objects, wherever 0.5.6 to 0.5.23 keep
them.

Changes nothing except its own marks, ``_sbs_*``. File names are relative to ``sglang/srt``. All
objects are SGLang's and untyped here (``Any``), so that this package needs no SGLang."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from sglang_sbs.engine.config import split_tcp
from sglang_sbs.wire.endforward import MAX_SPAN_S, Accepted, EndForward, KvAddress, Role, Started

HEALTH_CHECK_RID_PREFIX = "HEALTH_CHECK"
"""Prefix of ``/health`` requests (``constants.py``), which no router sends."""
RUST_SERVER_DIGITS = 16
_MOST_COUNT, _MOST_ROOM = 1 << 40, (1 << 63) - 1
"""Largest values of counts and of bootstrap rooms allowed in the message."""
_LIMITS = {
    "chunk_tokens": ("chunked_prefill_size", "max_prefill_tokens"),
    "max_running_requests": ("max_running_requests",),
    "kv_capacity_tokens": ("max_total_num_tokens",),
}
"""Fields of EndForward, and the scheduler's attributes for them; the first one that is set is
used."""


class ProcessPosition(NamedTuple):
    """Position of a scheduler process in its engine."""

    dp_rank: int
    dp_size: int
    emits: bool
    """Whether this process reports. One process per KV cache does: the first of its pipeline,
    attention TP and context group."""
    barrier: bool
    """Whether the DP ranks run their event loops in lockstep: in every turn they gather each rank's
    contribution to a pass (``managers/scheduler_components/dp_attn.py``)."""
    processes: int
    """Processes of this DP rank (attention TP x CP), per pipeline stage; 0: unknown in this
    SGLang."""
    number: int
    """Number of this process among those of its DP rank; process 0 receives the requests and passes
    them on."""
    stages: int
    """Number of pipeline stages."""
    hosts: int
    """Hosts of the engine (``--nnodes``); 0: unknown in this SGLang."""


class LaunchedPass(NamedTuple):
    """One forward pass as it was launched."""

    forward_id: int
    mode: str
    launch_s: float
    extend_tokens: int
    cached_tokens: int
    batch_size: int
    tokens_per_rank: list[int] | None
    is_extend: bool
    finished: Sequence[str] = ()
    """Ids of the requests whose last prompt tokens are in this pass."""

    @property
    def tokens(self) -> int:
        return self.extend_tokens if self.is_extend else self.batch_size


class Draft(EndForward, frozen=False):  # type: ignore[misc]
    """A mutable EndForward that is being filled in; receivers get it frozen."""


def read_placement(scheduler: Any) -> ProcessPosition:
    """Return the position of this process, by the rule of ``disaggregation/kv_events.py``
    (0.5.16+).

    The numbers are in ``runtime_context.get_parallel()`` since SGLang 0.5.22, in ``scheduler.ps``
    from 0.5.14 to 0.5.20, and on the scheduler itself until 0.5.12. There ``attn_dp_size`` follows
    from the arguments. Releases before 0.5.10 have no context parallelism of attention.
    """
    ranks, args = _parallel(scheduler), getattr(scheduler, "server_args", None)
    attn_dp_size = getattr(ranks, "attn_dp_size", None)
    if attn_dp_size is None:
        attn_dp_size = ranks.dp_size if scheduler.server_args.enable_dp_attention else 1
    by_attention = int(attn_dp_size) > 1
    tp_rank, cp_rank = int(ranks.attn_tp_rank), int(getattr(ranks, "attn_cp_rank", 0))
    attn_tp_size = int(getattr(ranks, "attn_tp_size", 0))
    return ProcessPosition(
        dp_rank=int((ranks.attn_dp_rank if by_attention else ranks.dp_rank) or 0),
        dp_size=int(attn_dp_size) if by_attention else max(1, int(ranks.dp_size)),
        emits=ranks.pp_rank == 0 and tp_rank == 0 and cp_rank == 0,
        barrier=by_attention and not skips_gather(),
        processes=attn_tp_size * int(getattr(ranks, "attn_cp_size", 1)),
        number=cp_rank * attn_tp_size + tp_rank,
        stages=int(getattr(ranks, "pp_size", 1)),
        hosts=int(getattr(args, "nnodes", 0)),
    )


def rank_is_on_several_hosts(scheduler: Any, placement: ProcessPosition) -> bool:
    """Return whether the DP rank's processes, which have consecutive TP ranks, span several
    hosts."""
    if placement.hosts < 2:
        return False
    processes_here = int(scheduler.server_args.tp_size) // placement.hosts
    return processes_here % placement.processes > 0


def read_dist_init_addr(scheduler: Any) -> str:
    """Return the address shared by an engine's nodes (``--dist-init-addr``); empty on one node."""
    args = getattr(scheduler, "server_args", None)
    several = int(getattr(args, "nnodes", 0)) > 1
    return str(getattr(args, "dist_init_addr", None) or "")[:256] if several else ""


def read_kv_address(scheduler: Any) -> KvAddress | None:
    """Return where this rank publishes its KV events if it is on another node than the first, whose
    address routers know. The host is empty for a wildcard.

    ``ZmqEventPublisher`` of ``disaggregation/kv_events.py`` has the address; before 0.5.14 it is on
    the scheduler itself."""
    args = getattr(scheduler, "server_args", None)
    node_rank = getattr(_parallel(scheduler), "node_rank", None)
    node_rank = getattr(args, "node_rank", 0) if node_rank is None else node_rank
    owner = getattr(scheduler, "kv_events_publisher", scheduler)
    publisher = getattr(owner, "kv_event_publisher", None)
    bound = _bound_tcp(publisher, "_local_pub_endpoint", "_endpoint")
    if not node_rank or bound is None:
        return None
    replay = _bound_tcp(publisher, "_local_replay_endpoint", "_replay_endpoint")
    return KvAddress(*bound, replay[1] if replay is not None else 0)


def _bound_tcp(publisher: Any, *names: str) -> tuple[str, int] | None:
    """Return host (empty for a wildcard) and port from the first attribute that exists."""
    bound = [getattr(publisher, name) for name in names if hasattr(publisher, name)]
    try:
        host, port = split_tcp(bound[0] or "" if bound else "")
    except ValueError:
        return None
    return "" if host in ("*", "0.0.0.0", "::") else host, port


def skips_gather() -> bool:
    """Return whether DP ranks are configured to run passes without a barrier. DWDP sets the
    variable (``arg_groups/parallel_hook.py``: ``handle_dwdp``) in the server's process before it
    starts the schedulers."""
    setting = os.environ.get("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "")
    return setting.lower() in ("1", "true", "yes", "y")


def _parallel(scheduler: Any) -> Any:
    """Return the object with the parallel ranks and sizes (:func:`read_placement`)."""
    ranks = getattr(scheduler, "ps", None)
    if ranks is None and hasattr(scheduler, "attn_tp_rank"):
        return scheduler
    return ranks or importlib.import_module("sglang.srt.runtime_context").get_parallel()


def read_role(scheduler: Any) -> Role:
    """Return ``disaggregation_mode``, which is read for every message because it can change at run
    time."""
    return cast(Role, scheduler.disaggregation_mode.value)


def read_pass(scheduler: Any, batch: Any, entered_s: float, dp_size: int) -> LaunchedPass:
    """Describe a batch right after ``Scheduler.run_batch`` (``managers/schedule_batch.py``).

    The pass number is ``batch.forward_iter`` since SGLang 0.5.12, ``scheduler.forward_ct`` in
    earlier releases. Decode batches merged from prefilled requests keep ``extend_num_tokens``, so
    the count is read only from extend passes. ``TARGET_VERIFY`` is extend in SGLang, but not here.
    ``entered_s``: time of entering run_batch, used for batches without ``launch_ts`` (before
    0.5.18)."""
    mode = batch.forward_mode
    is_extend = mode.is_extend() and not mode.is_target_verify()
    stats = getattr(batch, "prefill_stats", None) if is_extend else None
    per_rank = getattr(batch, "global_num_tokens", None)
    return LaunchedPass(
        forward_id=int(getattr(batch, "forward_iter", None) or scheduler.forward_ct),
        mode=mode.name.lower(),
        launch_s=getattr(batch, "launch_ts", None) or entered_s,
        # SGLang fault: sticky-extend-count
        extend_tokens=int(batch.extend_num_tokens or 0) if is_extend else 0,
        cached_tokens=int(stats.log_hit_tokens) if stats is not None else 0,
        batch_size=len(batch.reqs),
        tokens_per_rank=list(per_rank) if per_rank and len(per_rank) == dp_size else None,
        is_extend=is_extend,
        finished=_finished(batch.reqs) if is_extend else (),
    )


def _finished(reqs: Sequence[Any]) -> list[str]:
    """Return the requests whose prefill ends in this pass. Each is marked, because a later mixed
    pass contains it again as a decoding request."""
    finished = []
    for req in reqs:
        if _launched_len(req) < len(req.origin_input_ids) or getattr(req, "_sbs_finished", False):
            continue
        req._sbs_finished = True
        if not is_health_check(req):
            finished.append(sent_rid(req))
    return finished


def note_pass(result: Any, launched: LaunchedPass) -> None:
    """Attach a pass to SGLang's result, which the event loops carry to the end of the pass. Does
    nothing if the result accepts no attributes; :func:`noted_pass` then returns None."""
    with contextlib.suppress(AttributeError):
        result._sbs_pass = launched


def noted_pass(result: Any) -> LaunchedPass | None:
    return getattr(result, "_sbs_pass", None)


def newly_started(batch: Any) -> list[Started]:
    """Return requests that were in no earlier pass, and mark them. Times are SGLang's own
    (``observability/req_time_stats.py``): ``time.perf_counter``, the monotonic clock on Linux."""
    started = []
    for req in batch.reqs:
        if getattr(req, "_sbs_started", False) or is_health_check(req):
            continue
        req._sbs_started = True
        stats = getattr(req, "time_stats", None)
        queued_s = float(getattr(stats, "prefill_bootstrap_queue_entry_time", 0.0))
        schedulable_s = float(getattr(stats, "wait_queue_entry_time", 0.0))
        started.append(Started(sent_rid(req), queued_s, schedulable_s, _prefix_len(req)))
    return started


def describe_accepted(req: Any, role: Role, now_s: float) -> Accepted:
    """Describe a request that was just accepted.

    The HTTP server's ``created_time`` is available if :func:`keep_created_time` is hooked.
    Otherwise the scheduler's own time is used, which is up to a pass later
    (``observability/req_time_stats.py``)."""
    stats = getattr(req, "time_stats", None)
    times_s = [getattr(stats, name, 0.0) for name in ("created_time", "scheduler_recv_time")]
    arrived_s = float(next(filter(None, times_s), now_s))
    most = getattr(getattr(req, "sampling_params", None), "max_new_tokens", None) or 0
    if role == "prefill":  # SGLang has replaced the client's value by 1.
        most = 0
    room = getattr(req, "bootstrap_room", None) or 0
    return Accepted(
        sent_rid(req),
        len(req.origin_input_ids),
        # If the clock cannot be right, use the time of the message.
        arrived_s if max(0.0, now_s - MAX_SPAN_S) <= arrived_s <= now_s else now_s,
        min(max(0, int(most)), _MOST_COUNT),
        int(room) if 0 <= int(room) <= _MOST_ROOM else 0,
    )


def keep_created_time(state: Any, stats: Any) -> None:
    """Hook after ``__getstate__`` that adds ``created_time`` to the times which the HTTP server and
    the DP controller send with a request. SGLang omits the field, but converts it on arrival."""
    # SGLang fault: arrival-left-behind
    created_s = getattr(stats, "created_time", 0.0)
    if created_s and isinstance(state, dict):
        state["created_time"] = created_s


def sent_rid(req: Any) -> str:
    """Return the request's original id: SGLang's Rust server appends ``#`` and 16 digits of its own
    (seen in 0.5.23), which the router would not recognize."""
    rid = str(req.rid)
    # SGLang fault: rust-rid-suffix
    sent, mark, own = rid.rpartition("#")
    return sent if mark and len(own) == RUST_SERVER_DIGITS else rid


def is_health_check(req: Any) -> bool:
    return str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX)


class SchedulerReader:
    """Reads one SGLang scheduler into the next message of its rank. Features missing in the version
    are detected once, and their fields stay 0."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.placement = read_placement(scheduler)
        self._used_tokens = _used_tokens_reader(scheduler)
        self._inquirer = hasattr(
            getattr(scheduler, "load_inquirer", None), "get_num_waiting_uncached_tokens"
        )
        rank, ranks = self.placement.dp_rank, self.placement.dp_size
        self.draft: Any = Draft(
            instance_id="", boot_id="", role="null", dp_rank=rank, dp_size=ranks, seq=0, kind="idle"
        )
        for field, names in _LIMITS.items():
            known = (getattr(scheduler, name, 0) for name in names)
            setattr(self.draft, field, int(next(filter(None, known), 0)))
        self.missing = ["kv_tokens"] if self._used_tokens is None else []
        """Names of message fields that this SGLang version cannot fill."""
        self.missing += [name for name in _LIMITS if not getattr(self.draft, name)]

    def is_spin(self, launched: LaunchedPass) -> bool:
        """Return whether this is a turn of an idle rank and not a pass: without a barrier (and
        without DWDP) SGLang runs an empty batch in each turn (``dp_attn.py``:
        ``need_idle_batch``)."""
        return launched.mode == "idle" and not self.draft.barrier

    def inflight(self) -> list[LaunchedPass]:
        """Passes launched and not yet processed, oldest first (overlap scheduling only)."""
        queue = getattr(self.scheduler, "result_queue", None) or ()
        noted = (noted_pass(result) for _, result in queue)
        return [launched for launched in noted if launched is not None]

    def count(self) -> tuple[int, ...]:
        """Read the role and cheap counts, from attributes that are the same from 0.5.6 to 0.5.23.
        Returns the values whose change is worth a message."""
        s, draft = self.scheduler, self.draft
        role = draft.role = read_role(s)
        waiting, bootstrapping, transfer = len(s.waiting_queue), 0, 0
        if role == "prefill":
            bootstrapping = len(s.disagg_prefill_bootstrap_queue.queue)
            transfer = len(s.disagg_prefill_inflight_queue)
        elif role == "decode":
            prealloc = s.disagg_decode_prealloc_queue
            waiting += len(prealloc.retracted_queue)
            transfer = len(prealloc.queue) + len(s.disagg_decode_transfer_queue.queue)
        draft.inflight_passes = passes = len(self.inflight())
        draft.waiting_requests, draft.bootstrapping_requests = waiting, bootstrapping
        draft.kv_transfer_requests = transfer
        draft.running_requests = running = len(s.running_batch.reqs)
        chunking = s.chunked_req is not None
        accepted, aborted = draft.accepted_requests, draft.aborted_requests
        counts = passes, waiting, bootstrapping, chunking, transfer, running
        return *counts, accepted, aborted

    def is_quiescent(self) -> bool:
        """Return whether :meth:`count` found nothing launched, waiting or bootstrapping
        (``EndForward.idle``)."""
        draft = self.draft
        ahead = draft.inflight_passes or draft.waiting_requests or draft.bootstrapping_requests
        running = draft.role != "prefill" and draft.running_requests
        return not (ahead or running) and self.scheduler.chunked_req is None

    def backlog(self, role: Role) -> Any:
        """Read the token counts, which need a walk over queues or pools; return the message so
        far."""
        s, draft = self.scheduler, self.draft
        inflight, chunked = self.inflight(), s.chunked_req
        queue = s.disagg_prefill_bootstrap_queue.queue if role == "prefill" else ()
        left = 0 if chunked is None else max(0, chunked.seqlen - _launched_len(chunked))
        draft.inflight_tokens = sum(launched.tokens for launched in inflight)
        draft.inflight_requests = sum(launched.batch_size for launched in inflight)
        draft.waiting_tokens = self._waiting_tokens(role)
        draft.bootstrapping_tokens = sum(len(req.origin_input_ids) for req in queue)
        draft.chunk_remainder_tokens = left
        draft.kv_tokens = 0 if self._used_tokens is None else int(self._used_tokens())
        return draft

    def accepted(self, req: Any, role: Role) -> bool:
        """Return whether ``Scheduler._add_request_to_queue`` just accepted ``req`` for the first
        time. Refused requests are in no queue, and retracted ones already have a mark."""
        s = self.scheduler
        if is_health_check(req) or getattr(req, "_sbs_accepted", False):
            return False
        if role == "prefill":
            newest = s.disagg_prefill_bootstrap_queue.queue[-1:]
        elif role == "decode":
            newest = [entry.req for entry in s.disagg_decode_prealloc_queue.queue[-1:]]
        else:
            newest = s.waiting_queue[-1:]
        if not newest or newest[0] is not req:
            return False
        req._sbs_accepted = True
        return True

    def newly_aborted(self, abort: Any, role: Role) -> int:
        """Return the number of accepted requests that an ``AbortReq`` will end, before the
        scheduler handles it: by rid prefix, or all, as in ``Scheduler.abort_request``. A repeated
        abort counts once."""
        count = 0
        for req in self._requests(role):
            going_on = getattr(req, "_sbs_accepted", False) and not req.finished()
            meant = abort.abort_all or req.rid.startswith(abort.rid)
            if going_on and meant and not getattr(req, "_sbs_aborted", False):
                req._sbs_aborted = True
                count += 1
        return count

    def _requests(self, role: Role) -> Iterator[Any]:
        s = self.scheduler
        if s.chunked_req is not None:
            yield s.chunked_req
        yield from s.waiting_queue
        yield from s.running_batch.reqs
        if getattr(s, "last_batch", None) is not None:
            yield from s.last_batch.reqs
        for batch, _ in getattr(s, "result_queue", None) or ():
            yield from batch.reqs
        if role == "prefill":
            yield from s.disagg_prefill_bootstrap_queue.queue
            yield from s.disagg_prefill_inflight_queue
        elif role == "decode":
            prealloc, transfer = s.disagg_decode_prealloc_queue, s.disagg_decode_transfer_queue
            yield from prealloc.retracted_queue
            yield from (entry.req for entry in (*prealloc.queue, *transfer.queue))

    def _waiting_tokens(self, role: Role) -> int:
        """Return the uncached tokens of ``waiting_queue``.

        ``SchedulerLoadInquirer.get_num_waiting_uncached_tokens`` (0.5.14+,
        ``managers/scheduler_components/load_inquirer.py``) includes the chunked request with
        everything after its last cached token, even the chunk in flight, which is subtracted
        here."""
        s = self.scheduler
        if role == "decode" or not s.waiting_queue:
            return 0
        if not self._inquirer:
            return sum(int(req.seqlen) for req in s.waiting_queue)
        tokens = int(s.load_inquirer.get_num_waiting_uncached_tokens())
        chunked = s.chunked_req
        if chunked is not None:
            tokens -= max(0, chunked.seqlen - _prefix_len(chunked))
        return max(0, tokens)


def _used_tokens_reader(scheduler: Any) -> Callable[[], Any] | None:
    """Return a reader of the KV tokens in use, without the prefix cache.

    It uses ``get_pool_stats`` of the ``pool_stats_observer`` (0.5.14+) or the scheduler (0.5.11,
    0.5.12). Earlier releases have it as the first number of ``_get_token_info``, under other names
    in models with two kinds of layers (``managers/scheduler_runtime_checker_mixin.py``)."""
    if hasattr(scheduler, "pool_stats_observer"):
        return lambda: scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()[0]
    if hasattr(scheduler, "get_pool_stats"):
        return lambda: scheduler.get_pool_stats().get_kv_token_stats()[0]
    if getattr(scheduler, "is_hybrid_swa", False):
        name = "_get_swa_token_info"
    elif getattr(scheduler, "is_hybrid_ssm", False) or getattr(scheduler, "is_ssm_model", False):
        name = "_get_mamba_token_info"
    else:
        name = "_get_token_info"
    reader = getattr(scheduler, name, None)
    return None if reader is None else lambda: reader()[0]


def _prefix_len(req: Any) -> int:
    """Return the tokens of a request that are in its KV row (``prefix_len`` since 0.5.22)."""
    return int(req.prefix_len) if hasattr(req, "prefix_len") else len(req.prefix_indices)


def _launched_len(req: Any) -> int:
    """Return the end of the newest chunk put into a batch: ``extend_end`` since 0.5.22,
    ``extend_range`` in 0.5.16 to 0.5.20, ``fill_len`` in 0.5.14, ``fill_ids`` before."""
    if hasattr(req, "extend_end"):
        end = req.extend_end
    elif hasattr(req, "extend_range"):
        end = getattr(req.extend_range, "end", None)
    else:
        end = req.fill_len if hasattr(req, "fill_len") else len(req.fill_ids)
    # None: withdrawn before its next chunk was cut.
    return _prefix_len(req) if end is None else int(end)
