"""Splits a client request into single ones, and builds their bodies for prefill and decode. Decides
which fields of SGLang's JSON a client may set, and limits the size of all bodies together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import msgspec
import orjson

from sglang_sbs.router.errors import ANTHROPIC_PATH
from sglang_sbs.router.limits import MAX_SESSION_CHARS
from sglang_sbs.router.options.config import RelayConfig
from sglang_sbs.router.requests import body_fields
from sglang_sbs.router.requests.body_fields import Body, is_true, text_of
from sglang_sbs.router.requests.engine_refusals import check_flags, check_responses
from sglang_sbs.router.requests.raw_json import JsonError, joined, members_of
from sglang_sbs.router.requests.sessions import session_in_body
from sglang_sbs.router.requests.splitting import (
    Prompt,
    split_generate,
    split_messages,
    split_openai,
    split_responses,
)
from sglang_sbs.router.workers.rank_contract import decode_members, prefill_members
from sglang_sbs.router.workers.worker import AttemptWorkers

RouteKind = Literal["generate", "completions", "chat", "messages", "responses"]

PATHS: dict[RouteKind, str] = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": ANTHROPIC_PATH,
    "responses": "/v1/responses",
}
CONVERTED: tuple[RouteKind, ...] = ("messages", "responses")
"""Kinds of requests that engines convert to chats. SGLang's own fields have no effect in them."""
_RID_FIELD: dict[RouteKind, str] = {"responses": "request_id"}
"""Body field that sets the engine's id of a request, where it is not ``rid``. Clients of
``/v1/responses`` see that id."""

# SGLang fault: internal-fields-of-clients, duplicate-room
_INTERNAL_FIELDS = (
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
    "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "http_worker_ipc",
    "need_wait_for_mm_inputs", "num_items_assigned", "received_time", "encoder_urls", "lora_id",
    "positional_embed_overrides", "kv_hints", "external_trace_header", "background",
    "return_bytes",
)  # fmt: skip
"""Routing internals, and fields that one SGLang process sets for another: clients must not set
them. SGLang 0.5.23 accepts the latter from anyone (``managers/io_struct.py``). A number for
``positional_embed_overrides`` crashes an engine on CPU (``managers/scheduler.py``; elsewhere with
several nodes or pipeline parallelism), an unknown ``lora_id`` one with ``--enable-lora``."""
_INTERNAL = frozenset(_INTERNAL_FIELDS)

_ASK_CACHED = "return_cached_tokens_details"
_ASKS_CACHED = ("completions", "chat")
"""Kinds of requests for which SGLang has ``return_cached_tokens_details``."""
_IDS_FIELD = {"generate": "input_ids", "completions": "prompt", "chat": "input_ids"}
# SGLang fault: messages-without-rid
_RID_HEADER = b"x-override-rid: %b\r\n"
"""Header that sets the rid of ``/v1/messages``, whose body has no ``rid``. SGLang reads it if
``SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`` is on, as the plugin sets it. Otherwise the engine
generates an id, and only closing the connection ends the request."""
_MOST_OPTIONS_BYTES = 1024
"""Limit on ``stream_options``, which every request of a batch gets; SGLang has two switches in
it."""
_JOINED_BYTES = 1 << 16
"""Largest body that is joined and sent as one piece, which is faster for small bodies."""

Pieces = tuple[bytes | bytearray, ...]


class RequestPlan(msgspec.Struct, frozen=True, gc=False):
    kind: RouteKind
    stream: bool
    prompts: tuple[Prompt, ...]
    common: bytes | bytearray
    """JSON members that the bodies of all prefill and decode requests share."""
    samples: int
    """Units per prompt (``n``). A unit is sent as one prefill and one decode request. Its number is
    the position of its output, or of its first choice, in the merged response."""
    units: range
    as_list: bool
    """True if the response is a list, even with one entry (``/generate``, a batch or ``n > 1``)."""
    merge_logprobs: bool
    """True if the response includes input logprobs, which only prefill has."""
    may_ask_cached: bool
    """True if prefill can be asked for its cached tokens. ``/generate`` always reports them, and
    the field for it is left alone if the client set it."""
    stream_options: bytes | None
    """The client's ``stream_options`` as JSON, if any."""
    client_rids: tuple[str, ...]
    model: str = ""
    session: str = ""
    """Session id from the body."""
    priority: int = 0
    """Priority as the client wrote it."""

    @property
    def single(self) -> bool:
        return len(self.units) == 1 and not self.as_list

    @property
    def edits_answers(self) -> bool:
        """True if engines' responses are modified before they are passed on."""
        return self.merge_logprobs or bool(self.client_rids)

    def client_rid(self, unit: int) -> str | None:
        """Return the client's id of a unit's output, if it gave any. From a single id, the ids of a
        batch are derived as in SGLang."""
        if not self.client_rids:
            return None
        if len(self.client_rids) == len(self.units):
            return self.client_rids[unit]
        return f"{self.client_rids[0]}_{unit}"

    def forget_values(self) -> None:
        """Free the memory of the prompts' values; call it once they are tokenized."""
        for prompt in self.prompts:
            prompt.value = None


def plan_request(
    kind: RouteKind,
    raw: bytes | bytearray,
    limits: RelayConfig | None = None,
    refused: Collection[str] = (),
) -> RequestPlan:
    """Check a request body, and split it into units. ``refused``: fields that all prefill or all
    decode engines refuse. Raises: RouterError (400), naming the field and the problem."""
    try:
        return _plan(kind, raw, limits or RelayConfig(), refused)
    except JsonError as error:
        raise body_fields.bad_request(f"the request body: {error}") from error
    except orjson.JSONEncodeError as error:
        raise body_fields.bad_request(f"the request body cannot be forwarded: {error}") from error


def _plan(
    kind: RouteKind, raw: bytes | bytearray, limits: RelayConfig, refused: Collection[str]
) -> RequestPlan:
    body = Body(members_of(raw))
    fields = body.typed
    if kind == "responses":
        check_responses(fields)
    elif kind != "messages":  # SGLang ignores such fields in both
        check_flags(kind, fields, refused)
    for name in _INTERNAL.intersection(body):
        del body[name]
    stream = body_fields.stream_of(fields)
    options = body.get("stream_options") if fields.get("stream_options") is not None else None
    if options is not None and len(memoryview(options)) > _MOST_OPTIONS_BYTES:
        raise body_fields.bad_request(f"stream_options is over {_MOST_OPTIONS_BYTES} bytes")
    # Responses of the other kinds have no place for it, or have the engine's id there.
    rid = None if kind in CONVERTED else fields.get("rid")
    for name in ("stream", "stream_options", "rid", _RID_FIELD.get(kind, "rid")):
        body.pop(name, None)
    merge = False
    if kind == "generate":
        merge = body_fields.any_true(fields.get("return_logprob"))
        split = split_generate(body, limits)
    elif kind == "messages":
        split = split_messages(raw, body)
    elif kind == "responses":
        split = split_responses(raw, body)
    else:
        split = split_openai(kind, raw, body, limits)
        echoes = kind == "completions" and is_true(fields.get("echo"))
        merge = echoes and is_true(fields.get("logprobs"))
    prompts, samples, as_list = split
    common = joined(body.items())
    units = len(prompts) * samples
    legs_bytes = units * len(common) + samples * sum(len(p.member) + len(p.own) for p in prompts)
    if legs_bytes > limits.max_legs_bytes:
        all_legs = f"{units} requests with {len(common)} bytes in common are {legs_bytes} bytes"
        most = f"over the limit of {limits.max_legs_bytes}"
        raise body_fields.bad_request(f"{all_legs} for the engines, {most}")
    return RequestPlan(
        kind=kind,
        stream=stream,
        prompts=tuple(prompts),
        common=common,
        samples=samples,
        units=range(units),
        as_list=as_list,
        merge_logprobs=merge,
        may_ask_cached=kind in _ASKS_CACHED and _ASK_CACHED not in body,
        stream_options=None if options is None or kind in CONVERTED else bytes(options),
        client_rids=body_fields.rids_of(rid, units),
        model="" if kind == "generate" else text_of(fields, "model")[:MAX_SESSION_CHARS],
        session=session_in_body(body, has_user=kind == "messages"),
        priority=body_fields.priority_of(fields),
    )


def leg_headers(kind: RouteKind, headers: bytes, rid: str) -> Pieces:
    """Return the header lines for prefill and decode, with the rid if the body has no field for
    it."""
    return (headers, _RID_HEADER % rid.encode()) if kind == "messages" else (headers,)


def leg_bodies(
    unit: int,
    plan: RequestPlan,
    placement: AttemptWorkers,
    *,
    rid: str,
    room: int,
    ids_json: bytes | None = None,
    asks_cached: bool = False,
) -> tuple[Pieces, Pieces]:
    """Return a unit's bodies for prefill and decode. Large pieces are shared, not copied. Prefill
    is asked not to stream: its HTTP status then shows the result, and its counts come at once.
    ``ids_json``: token ids to send instead of the text or with a chat. ``asks_cached``: ask prefill
    for its cached tokens."""
    prefiller, decoder, rank = placement.prefill, placement.decode, placement.prefill_rank
    shared = {
        _RID_FIELD.get(plan.kind, "rid"): rid,
        "bootstrap_host": prefiller.bootstrap_host,
        "bootstrap_port": prefiller.bootstrap_port,
        "bootstrap_room": room,
    }
    hint = prefiller.rank_is_a_hint
    prefill_ranks = prefill_members(rank, coupled=prefiller.known.coupled, hint=hint)
    prefill = shared | prefill_ranks | {"stream": False}
    if asks_cached:
        prefill[_ASK_CACHED] = True
    coupled = decoder.known.coupled
    decode_ranks = decode_members(rank, placement.decode_rank, coupled=coupled, hint=hint)
    decode = shared | decode_ranks | {"stream": plan.stream}
    prompt = plan.prompts[unit // plan.samples]
    member = prompt.member
    if ids_json is not None:
        member = b'"%b":%b' % (_IDS_FIELD[plan.kind].encode(), ids_json)
    members = [piece for piece in (member, prompt.own, plan.common) if piece]
    options = plan.stream_options if plan.stream else None
    more = b"" if options is None else b',"stream_options":%b' % options
    return _pieces(members, prefill, b""), _pieces(members, decode, more)


def _pieces(members: list[bytes | bytearray], fields: dict[str, Any], more: bytes) -> Pieces:
    end = b"%b%b}" % (orjson.dumps(fields)[1:-1], more)
    if sum(map(len, members)) <= _JOINED_BYTES:
        return (b"{%b}" % b",".join((*members, end[:-1])),)
    pieces: list[bytes | bytearray] = [b"{"]
    for member in members:
        pieces += (member, b",")
    return (*pieces, end)
