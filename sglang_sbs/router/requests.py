"""Request bodies: checking, splitting into single requests, and the fields each leg gets.

Owns what is read from and written into SGLang's request JSON. Must not know how a request is sent
or where to. ``n > 1`` and batch inputs share one bootstrap room inside SGLang and break PD there,
so they become single requests here, each with a room of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import orjson

from sglang_sbs.router.block_names import PLAIN, Namespace
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.rank_contract import decode_members, prefill_members
from sglang_sbs.wire.front_end import MAX_COUNT, MAX_SESSION_CHARS

RouteKind = Literal["generate", "completions", "chat"]
MAX_UNITS = 16_384
"""Single requests one client request may become."""

_INTERNAL_FIELDS = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "http_worker_ipc",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "received_time",
    "encoder_urls",
    "lora_id",
    "positional_embed_overrides",
    "kv_hints",
    "external_trace_header",
    "background",
    "return_bytes",
)
"""Routing internals and fields one SGLang process sets for another: never the client's to give.
SGLang 0.5.23 takes the later ones of anyone and believes them (``managers/io_struct.py``): a number
for ``positional_embed_overrides`` ends an engine on CPU (``managers/scheduler.py``; elsewhere with
several nodes or pipeline parallelism), an unknown ``lora_id`` one with ``--enable-lora``."""

_PER_PROMPT_FIELDS = (
    "text",
    "input_ids",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "mm_hashes",
    "mm_content_hashes",
    "sampling_params",
    "watermark",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_hidden_states",
    "modalities",
    "lora_path",
    "custom_logit_processor",
    "extra_key",
    "cache_salt",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
)
"""Fields of ``GenerateReqInput`` that a batch may give per prompt (its ``__getitem__``)."""

_LOGPROB_FIELDS = ("token_ids_logprob",)
"""Lists of their own right: per prompt only when they are lists of lists."""

_PROMPT_FIELDS = ("text", "input_ids", "input_embeds")
_BESIDES_PROMPT = frozenset(
    {"image_data", "video_data", "audio_data", "embed_overrides", "session_params"}
)
"""With one of these the engine's prompt is more than the prompt of the body."""
_IDS_FIELD: dict[RouteKind, str] = {
    "generate": "input_ids",
    "completions": "prompt",
    "chat": "input_ids",
}
_ASK_CACHED = "return_cached_tokens_details"
_NAMESPACE_FIELDS = ("cache_salt", "extra_key", "lora_path")
_SESSION_FIELDS = ("session_id", "prompt_cache_key")

_DEFAULT_MAX_TOKENS = {"generate": 128, "completions": 16, "chat": None}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a client request."""

    value: Any
    """Text, token ids, embeddings or the body of a chat, for counting tokens."""
    member: bytes
    """It as a member of the JSON both legs get; empty for a chat, which is all over the body."""
    namespace: Namespace | None
    """Of the KV cache; ``None``: the body does not say it clearly."""
    alone: bool = True
    """There is nothing in the engine's prompt but what ``value`` has."""
    takes_ids: bool = False
    """Its token ids say the same: no answer depends on its being text."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One single request of a plan: one room, one pair of legs."""

    index: int
    """Position of its output, or of its first choice, in the merged answer."""
    prompt_index: int
    common: bytes
    """The JSON both legs share without the prompt, an object without its closing brace."""
    max_new_tokens: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a client request becomes."""

    kind: RouteKind
    stream: bool
    units: tuple[Unit, ...]
    prompts: tuple[Prompt, ...]
    samples: int
    """``n``: units per prompt."""
    as_list: bool
    """``/generate`` answers a batch or ``n > 1`` with a list, even of one."""
    merge_logprobs: bool
    """The answer carries input logprobs, which only prefill has."""
    stream_options: Any
    client_rids: tuple[str, ...]
    """Ids by which the client may abort it later."""
    model: str = ""
    session: str = ""
    """What the client calls its conversation in the body."""
    priority: int = 0
    """As the client wrote it."""

    @property
    def single(self) -> bool:
        return len(self.units) == 1 and not self.as_list

    def client_rid(self, position: int) -> str | None:
        """The client's id of one output; SGLang makes a batch's ids from a single one."""
        if not self.client_rids:
            return None
        if len(self.client_rids) == len(self.units):
            return self.client_rids[position]
        return f"{self.client_rids[0]}_{position}"


def bad_request(message: str, code: str = "invalid_request") -> RouterError:
    return RouterError(400, code, message)


def plan_request(kind: RouteKind, raw: bytes) -> Plan:
    """Check a body and split it.

    Raises:
        RouterError: 400, naming the field and what is wrong with it.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the request body must be a JSON object")
    for name in _INTERNAL_FIELDS:
        body.pop(name, None)
    stream = body.pop("stream", None) or False
    if not isinstance(stream, bool):
        raise bad_request(f"stream must be true or false, not {stream!r}")
    options = body.pop("stream_options", None)
    rid = body.pop("rid", None)
    rids = tuple(rid) if isinstance(rid, list) else () if rid is None else (rid,)
    if not all(isinstance(item, str) for item in rids):
        raise bad_request("rid must be a string or a list of strings")
    if kind == "generate":
        units, prompts, samples, as_list = _split_generate(body)
        logprobs = body.get("return_logprob")
        merge = any(logprobs) if isinstance(logprobs, list) else bool(logprobs)
    else:
        units, prompts, samples = _split_openai(kind, body)
        as_list = False
        merge = kind == "completions" and bool(body.get("echo") and body.get("logprobs"))
    return Plan(
        kind=kind,
        stream=stream,
        units=tuple(units),
        prompts=tuple(prompts),
        samples=samples,
        as_list=as_list,
        merge_logprobs=merge,
        stream_options=options,
        client_rids=rids,
        model=_text_of(body, "model") if kind != "generate" else "",
        session=_session_of(body),
        priority=_priority_of(body),
    )


# Splitting ------------------------------------------------------------------------------------


def _split_generate(body: dict[str, Any]) -> tuple[list[Unit], list[Prompt], int, bool]:
    key = next((k for k in _PROMPT_FIELDS if body.get(k) is not None), None)
    if key is None:
        raise bad_request("one of text, input_ids or input_embeds is required")
    batch = _batch_size(key, body[key])
    params = body.get("sampling_params")
    if batch is None and isinstance(params, list):
        raise bad_request("sampling_params must be an object: there is one prompt")
    samples = _samples_of(params)
    singles = [body] if batch is None else [_select(body, i, batch) for i in range(batch)]
    _check_units(len(singles), samples)
    units = []
    prompts = []
    for prompt_index, single in enumerate(singles):
        value = single.pop(key)
        for name in _PROMPT_FIELDS:
            if name in single and single[name] is None:
                del single[name]
        others = any(name in single for name in _PROMPT_FIELDS)
        prompts.append(_prompt(key, value, single, takes_ids=key == "text" and not others))
        own = single.get("sampling_params")
        common = _open_object(
            single if samples == 1 else single | {"sampling_params": {**(own or {}), "n": 1}}
        )
        limit = _limit(own.get("max_new_tokens") if isinstance(own, dict) else None)
        limit = _DEFAULT_MAX_TOKENS["generate"] if limit is None else limit
        units += [
            Unit(prompt_index * samples + j, prompt_index, common, limit) for j in range(samples)
        ]
    return units, prompts, samples, batch is not None or samples > 1


def _batch_size(key: str, prompts: Any) -> int | None:
    """Number of prompts in a batch; ``None`` for a single one."""
    if isinstance(prompts, str):
        return None
    if not isinstance(prompts, list):
        raise bad_request(f"{key} must be a string or a list")
    if not prompts:
        if key == "text":
            raise bad_request("text must not be an empty list")
        return None
    first = prompts[0]
    if key == "text":
        return len(prompts)
    if key == "input_ids":
        return len(prompts) if isinstance(first, list) else None
    nested = isinstance(first, list) and bool(first) and isinstance(first[0], list)
    return len(prompts) if nested else None


def _select(body: dict[str, Any], i: int, batch: int) -> dict[str, Any]:
    """The ``i``-th request of a batch."""
    single = dict(body)
    for name in _PER_PROMPT_FIELDS:
        value = single.get(name)
        if not isinstance(value, list):
            continue
        if name in _LOGPROB_FIELDS and not (value and isinstance(value[0], list)):
            continue
        if len(value) != batch:
            raise bad_request(f"{name} has {len(value)} entries for a batch of {batch}")
        single[name] = value[i]
    return single


def _samples_of(params: Any) -> int:
    """``n`` of native sampling parameters, 1 for beam search (there it counts beams)."""
    many = params if isinstance(params, list) else [params]
    if not all(item is None or isinstance(item, dict) for item in many):
        raise bad_request("sampling_params must be an object or a list of objects")
    values = {_positive("n", (item or {}).get("n")) for item in many} or {1}
    if len(values) > 1:
        raise bad_request("sampling_params.n must be the same for all prompts of a batch")
    if any((_limit((item or {}).get("beam_width")) or 1) > 1 for item in many):
        return 1
    return values.pop()


def _split_openai(kind: RouteKind, body: dict[str, Any]) -> tuple[list[Unit], list[Prompt], int]:
    samples = _positive("n", body.get("n"))
    if samples > 1:
        body["n"] = 1
    if kind == "chat":
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise bad_request("messages must be a non-empty list")
        prompts = [_chat_prompt(body)]
    else:
        prompt = body.pop("prompt", None)
        if not isinstance(prompt, str | list) or prompt == []:
            raise bad_request("prompt must be a string, a list of strings or token ids")
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        values = prompt if several else [prompt]
        # What is echoed is the text that was sent, not what its tokens decode to.
        plain = not body.get("echo")
        prompts = [_prompt("prompt", value, body, takes_ids=plain) for value in values]
    _check_units(len(prompts), samples)
    limit = _limit(body.get("max_completion_tokens"))
    if limit is None:
        limit = _limit(body.get("max_tokens"))
    if limit is None:
        limit = _DEFAULT_MAX_TOKENS[kind]
    common = _open_object(body)
    units = [
        Unit(prompt_index * samples + j, prompt_index, common, limit)
        for prompt_index in range(len(prompts))
        for j in range(samples)
    ]
    return units, prompts, samples


def _prompt(key: str, value: Any, rest: dict[str, Any], *, takes_ids: bool) -> Prompt:
    """``rest``: the single request without it."""
    alone = _is_alone(rest)
    takes_ids = takes_ids and alone and isinstance(value, str)
    return Prompt(value, _members({key: value}), _namespace_of(rest), alone, takes_ids)


def _chat_prompt(body: dict[str, Any]) -> Prompt:
    ids = body.get("input_ids")  # instead of what the messages would become
    if ids is None:
        body.pop("input_ids", None)
    alone = _is_alone(body)
    value = body if ids is None else ids
    return Prompt(value, b"", _namespace_of(body), alone, takes_ids=alone and ids is None)


def _is_alone(rest: dict[str, Any]) -> bool:
    return _BESIDES_PROMPT.isdisjoint(rest) or not any(map(rest.get, _BESIDES_PROMPT))


def _namespace_of(single: dict[str, Any]) -> Namespace | None:
    """Where the KV cache keeps it; ``None`` if that cannot be told (lists, odd types)."""
    parts = [single.get(name) or None for name in _NAMESPACE_FIELDS]
    if parts == [None, None, None]:
        return PLAIN
    if not all(part is None or isinstance(part, str) for part in parts):
        return None
    return Namespace(*parts)


def _session_of(body: dict[str, Any]) -> str:
    for name in _SESSION_FIELDS:
        if name in body and (session := _text_of(body, name)):
            return session
    return ""


def _priority_of(body: dict[str, Any]) -> int:
    value = body.get("priority")
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad_request(f"priority must be a whole number, as in 1, not {value!r:.40}")
    return value


def _text_of(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    return value[:MAX_SESSION_CHARS] if isinstance(value, str) else ""


def _limit(value: Any) -> int | None:
    """A limit of output tokens as the scheduler may count with; the engine judges nonsense."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return min(max(0, value), MAX_COUNT)


def _positive(name: str, value: Any) -> int:
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_request(f"{name} must be a whole number >= 1, not {value!r}")
    return value


def _check_units(prompts: int, samples: int) -> None:
    if prompts * samples > MAX_UNITS:
        raise bad_request(
            f"{prompts} prompts x {samples} samples are more than {MAX_UNITS} requests at once"
        )


def _open_object(body: dict[str, Any]) -> bytes:
    """JSON without the closing brace, so that a leg's own fields can be appended."""
    try:
        return orjson.dumps(body)[:-1]
    except orjson.JSONEncodeError as error:
        raise bad_request(f"the request body cannot be forwarded: {error}") from error


def _members(body: dict[str, Any]) -> bytes:
    return _open_object(body)[1:]


# Legs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LegFields:
    """The routing fields of one attempt. Ranks are those of the scheduler's dispatch."""

    rid: str
    bootstrap_host: str
    bootstrap_port: int | None
    bootstrap_room: int
    prefill_rank: int
    decode_rank: int
    prefill_coupled: bool = False
    """The engine is of a release that couples both ranks (``rank_contract``)."""
    decode_coupled: bool = False


def may_ask_cached(unit: Unit, plan: Plan) -> bool:
    """Whether prefill can be asked for it: ``/generate`` says it unasked, clients may forbid it."""
    return plan.kind != "generate" and _ASK_CACHED.encode() not in unit.common


def leg_bodies(
    unit: Unit,
    plan: Plan,
    fields: LegFields,
    ids_json: bytes | None = None,
    *,
    asks_cached: bool = False,
) -> tuple[bytes, bytes]:
    """The bodies for prefill and decode.

    Prefill is asked without streaming: its one reply says how the leg went by its HTTP status, and
    its counts come in one piece. ``ids_json``: token ids that both legs get instead of the text, or
    for a chat instead of what they would make of its messages. ``asks_cached``: prefill is to say
    how much it had cached, whether or not it was started to do so.
    """
    shared = {
        "rid": fields.rid,
        "bootstrap_host": fields.bootstrap_host,
        "bootstrap_port": fields.bootstrap_port,
        "bootstrap_room": fields.bootstrap_room,
    }
    prefill_ranks = prefill_members(fields.prefill_rank, coupled=fields.prefill_coupled)
    prefill = shared | prefill_ranks | {"stream": False}
    if asks_cached:
        prefill[_ASK_CACHED] = True
    decode_ranks = decode_members(
        fields.prefill_rank, fields.decode_rank, coupled=fields.decode_coupled
    )
    decode = shared | decode_ranks | {"stream": plan.stream}
    if plan.stream and plan.stream_options is not None:
        decode["stream_options"] = plan.stream_options
    prompt = plan.prompts[unit.prompt_index].member
    if ids_json is not None:
        prompt = b'"%b":%b' % (_IDS_FIELD[plan.kind].encode(), ids_json)
    both = b",".join(filter(None, (prompt, unit.common[1:])))
    return _append(both, prefill), _append(both, decode)


def _append(members: bytes, fields: dict[str, Any]) -> bytes:
    return b"{%b,%b" % (members, orjson.dumps(fields)[1:])
