"""What a client request becomes: single requests, and the bodies of their legs. Owns which fields
of SGLang's request JSON a client may give, and how large all legs may be."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from sglang_sbs.router.errors import ANTHROPIC_PATH
from sglang_sbs.router.options.config import RelayConfig
from sglang_sbs.router.requests import body_fields
from sglang_sbs.router.requests.engine_refusals import check_flags, check_responses
from sglang_sbs.router.requests.raw_json import JsonError, is_true, joined, members_of
from sglang_sbs.router.requests.sessions import session_in_body
from sglang_sbs.router.requests.splitting import (
    Prompt,
    split_generate,
    split_messages,
    split_openai,
    split_responses,
)
from sglang_sbs.router.workers.rank_contract import decode_members, prefill_members
from sglang_sbs.router.workers.worker import Placement

RouteKind = Literal["generate", "completions", "chat", "messages", "responses"]

PATHS: dict[RouteKind, str] = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": ANTHROPIC_PATH,
    "responses": "/v1/responses",
}
CONVERTED: tuple[RouteKind, ...] = ("messages", "responses")
"""Engines make a chat of these. They have no use for SGLang's own fields in them."""
_RID_FIELD: dict[RouteKind, str] = {"responses": "request_id"}
"""Where engines read their id for a request, if not in ``rid``. Clients see that of a response."""

# SGLang fault: internal-fields-of-clients, duplicate-room
_INTERNAL_FIELDS = (
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
    "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "http_worker_ipc",
    "need_wait_for_mm_inputs", "num_items_assigned", "received_time", "encoder_urls", "lora_id",
    "positional_embed_overrides", "kv_hints", "external_trace_header", "background",
    "return_bytes",
)  # fmt: skip
"""Routing internals and fields one SGLang process sets for another: never the client's to give.
SGLang 0.5.23 takes the later ones of anyone and believes them (``managers/io_struct.py``): a number
for ``positional_embed_overrides`` ends an engine on CPU (``managers/scheduler.py``; elsewhere with
several nodes or pipeline parallelism), an unknown ``lora_id`` one with ``--enable-lora``."""

_ASK_CACHED = "return_cached_tokens_details"
_ASKS_CACHED = ("completions", "chat")
"""Kinds of requests in which SGLang knows that field."""
_IDS_FIELD = {"generate": "input_ids", "completions": "prompt", "chat": "input_ids"}
# SGLang fault: messages-without-rid
_RID_HEADER = b"x-override-rid: %b\r\n"
"""``/v1/messages`` knows no ``rid`` in its body. SGLang takes one from this header where
``SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`` is on, as the plugin has it; elsewhere the engine makes
up an id of its own, and closing the connection is what ends the request."""
_MOST_OPTIONS_BYTES = 1024
"""Of ``stream_options``, which every request of a batch gets: SGLang knows two switches in it."""
_JOINED_BYTES = 1 << 16
"""Smaller bodies are one piece: that is quicker to send."""

Pieces = tuple[bytes | bytearray, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    kind: RouteKind
    stream: bool
    prompts: tuple[Prompt, ...]
    common: bytes | bytearray
    """Members of the JSON that all legs share."""
    samples: int
    """Units per prompt: a unit is one single request, one pair of legs. It is known by the position
    of its output, or of its first choice, in the merged answer."""
    as_list: bool
    """``/generate`` answers a batch or ``n > 1`` with a list, even of one."""
    merge_logprobs: bool
    """The answer carries input logprobs, which only prefill has."""
    may_ask_cached: bool
    """Prefill can be asked what it had cached: ``/generate`` says it unasked, and a client may have
    an opinion of its own."""
    stream_options: bytes | None
    """JSON."""
    client_rids: tuple[str, ...]
    model: str = ""
    session: str = ""
    """What the client calls its conversation in the body."""
    priority: int = 0
    """As the client wrote it."""

    @property
    def units(self) -> range:
        return range(len(self.prompts) * self.samples)

    @property
    def single(self) -> bool:
        return len(self.units) == 1 and not self.as_list

    @property
    def edits_answers(self) -> bool:
        """What engines answer is not passed on as it comes."""
        return self.merge_logprobs or bool(self.client_rids)

    def client_rid(self, unit: int) -> str | None:
        """The client's id of one output; SGLang makes a batch's ids from a single one."""
        if not self.client_rids:
            return None
        if len(self.client_rids) == len(self.units):
            return self.client_rids[unit]
        return f"{self.client_rids[0]}_{unit}"

    def forget_values(self) -> None:
        """Its prompts were read: nobody needs the objects that took any more."""
        for prompt in self.prompts:
            prompt.value = None


def plan_request(
    kind: RouteKind,
    raw: bytes | bytearray,
    limits: RelayConfig | None = None,
    refused: Collection[str] = (),
) -> Plan:
    """Check a body and split it. ``refused``: fields that all engines of a role refuse.
    Raises: RouterError (400), naming the field and what is wrong."""
    try:
        return _plan(kind, raw, limits or RelayConfig(), refused)
    except JsonError as error:
        raise body_fields.bad_request(f"the request body: {error}") from error
    except orjson.JSONEncodeError as error:
        raise body_fields.bad_request(f"the request body cannot be forwarded: {error}") from error


def _plan(
    kind: RouteKind, raw: bytes | bytearray, limits: RelayConfig, refused: Collection[str]
) -> Plan:
    body = members_of(raw)
    if kind == "responses":
        check_responses(body)
    elif kind != "messages":  # in both SGLang passes over such fields
        check_flags(kind, body, refused)
    for name in _INTERNAL_FIELDS:
        body.pop(name, None)
    stream = body_fields.stream_of(body)
    options = body_fields.given(body, "stream_options")
    if options is not None and len(memoryview(options)) > _MOST_OPTIONS_BYTES:
        raise body_fields.bad_request(f"stream_options is over {_MOST_OPTIONS_BYTES} bytes")
    # The others' answers have no place for it, or the engine's own id is there.
    rid = None if kind in CONVERTED else body_fields.given(body, "rid")
    for name in ("stream", "stream_options", "rid", _RID_FIELD.get(kind, "rid")):
        body.pop(name, None)
    merge = False
    if kind == "generate":
        merge = body_fields.any_true(body, "return_logprob")
        split = split_generate(body, limits)
    elif kind == "messages":
        split = split_messages(raw, body)
    elif kind == "responses":
        split = split_responses(raw, body)
    else:
        split = split_openai(kind, raw, body, limits)
        echoes = kind == "completions" and is_true(body.get("echo"))
        merge = echoes and is_true(body.get("logprobs"))
    prompts, samples, as_list = split
    common = joined(body.items())
    units = len(prompts) * samples
    legs_bytes = units * len(common) + samples * sum(len(p.member) + len(p.own) for p in prompts)
    if legs_bytes > limits.max_legs_bytes:
        all_legs = f"{units} requests with {len(common)} bytes in common are {legs_bytes} bytes"
        most = f"over the limit of {limits.max_legs_bytes}"
        raise body_fields.bad_request(f"{all_legs} for the engines, {most}")
    return Plan(
        kind=kind,
        stream=stream,
        prompts=tuple(prompts),
        common=common,
        samples=samples,
        as_list=as_list,
        merge_logprobs=merge,
        may_ask_cached=kind in _ASKS_CACHED and _ASK_CACHED not in body,
        stream_options=None if options is None or kind in CONVERTED else bytes(options),
        client_rids=body_fields.rids_of(rid, units),
        model=body_fields.text_of(body, "model") if kind != "generate" else "",
        session=session_in_body(body, has_user=kind == "messages"),
        priority=body_fields.priority_of(body),
    )


def leg_headers(kind: RouteKind, headers: bytes, rid: str) -> Pieces:
    """The header lines of both legs: ``headers``, and the rid where the body cannot have it."""
    return (headers, _RID_HEADER % rid.encode()) if kind == "messages" else (headers,)


def leg_bodies(
    unit: int,
    plan: Plan,
    placement: Placement,
    *,
    rid: str,
    room: int,
    ids_json: bytes | None = None,
    asks_cached: bool = False,
) -> tuple[Pieces, Pieces]:
    """The bodies for prefill and decode. What is large in them is there once, however many legs.
    Prefill is asked without streaming: its one reply says how the leg went by its HTTP status, and
    its counts come in one piece. ``ids_json``: token ids instead of the text, or for a chat of what
    engines would make of its messages. ``asks_cached``: prefill is to say how much it had cached.
    """
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
    members = [one for one in (member, prompt.own, plan.common) if one]
    options = plan.stream_options if plan.stream else None
    more = b"" if options is None else b',"stream_options":%b' % options
    return _pieces(members, prefill, b""), _pieces(members, decode, more)


def _pieces(members: list[bytes | bytearray], fields: dict[str, Any], more: bytes) -> Pieces:
    end = b"%b%b}" % (orjson.dumps(fields)[1:-1], more)
    if sum(map(len, members)) <= _JOINED_BYTES:
        return (b"{%b}" % b",".join((*members, end[:-1])),)
    pieces: list[bytes | bytearray] = [b"{"]
    for one in members:
        pieces += (one, b",")
    return (*pieces, end)
