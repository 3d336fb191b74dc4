"""What a client request becomes: single requests, and what their bodies have in common.

Owns which fields of SGLang's request JSON a client may give, and how large all legs may be. Its
prompts are :mod:`.splitting`'s, the bodies of the legs :mod:`.legs`'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from sglang_sbs.router.options.config import PlanLimits
from sglang_sbs.router.requests.body_fields import (
    any_true,
    bad_request,
    given,
    priority_of,
    rids_of,
    session_of,
    stream_of,
    text_of,
)
from sglang_sbs.router.requests.raw_json import JsonError, is_true, joined, members_of
from sglang_sbs.router.requests.splitting import Prompt, split_generate, split_openai

RouteKind = Literal["generate", "completions", "chat"]

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

ASK_CACHED = "return_cached_tokens_details"


@dataclass(frozen=True, slots=True)
class Unit:
    """One single request of a plan: one room, one pair of legs."""

    index: int
    """Position of its output, or of its first choice, in the merged answer."""
    prompt_index: int
    max_new_tokens: int | None


@dataclass(frozen=True, slots=True)
class Units:
    """All of a plan, each made when it is looked at: thousands may wait for their turn."""

    limits: Sequence[int | None]
    """Of output tokens, by prompt."""
    samples: int
    """Units per prompt."""

    def __len__(self) -> int:
        return len(self.limits) * self.samples

    def __getitem__(self, index: int) -> Unit:
        prompt_index = range(len(self))[index] // self.samples
        return Unit(index, prompt_index, self.limits[prompt_index])

    def __iter__(self) -> Iterator[Unit]:
        return map(self.__getitem__, range(len(self)))


@dataclass(frozen=True, slots=True)
class Plan:
    kind: RouteKind
    stream: bool
    units: Units
    prompts: tuple[Prompt, ...]
    common: bytes | bytearray
    """Members of the JSON that all legs share."""
    samples: int
    """``n``: units per prompt."""
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
    """Ids by which the client may abort it later."""
    model: str = ""
    session: str = ""
    """What the client calls its conversation in the body."""
    priority: int = 0
    """As the client wrote it."""

    @property
    def single(self) -> bool:
        return len(self.units) == 1 and not self.as_list

    @property
    def edits_answers(self) -> bool:
        """What engines answer is not passed on as it comes."""
        return self.merge_logprobs or bool(self.client_rids)

    def client_rid(self, position: int) -> str | None:
        """The client's id of one output; SGLang makes a batch's ids from a single one."""
        if not self.client_rids:
            return None
        if len(self.client_rids) == len(self.units):
            return self.client_rids[position]
        return f"{self.client_rids[0]}_{position}"

    def forget_values(self) -> None:
        """Its prompts were read: nobody needs the objects that took any more."""
        for prompt in self.prompts:
            prompt.value = None


def plan_request(kind: RouteKind, raw: bytes | bytearray, limits: PlanLimits | None = None) -> Plan:
    """Check a body and split it.

    Raises:
        RouterError: 400, naming the field and what is wrong with it.
    """
    try:
        return _plan(kind, raw, limits or PlanLimits())
    except JsonError as error:
        raise bad_request(f"the request body: {error}") from error
    except orjson.JSONEncodeError as error:
        raise bad_request(f"the request body cannot be forwarded: {error}") from error


def _plan(kind: RouteKind, raw: bytes | bytearray, limits: PlanLimits) -> Plan:
    body = members_of(raw)
    for name in _INTERNAL_FIELDS:
        body.pop(name, None)
    stream = stream_of(body)
    options = given(body, "stream_options")
    rid = given(body, "rid")
    for name in ("stream", "stream_options", "rid"):
        body.pop(name, None)
    if kind == "generate":
        merge = any_true(body, "return_logprob")
        split = split_generate(body, limits)
    else:
        split = split_openai(kind, raw, body, limits)
        echoes = kind == "completions" and is_true(body.get("echo"))
        merge = echoes and is_true(body.get("logprobs"))
    prompts, samples, as_list, own_limits = split
    common = joined(body.items())
    units = len(prompts) * samples
    legs_bytes = units * len(common) + samples * sum(len(p.member) + len(p.own) for p in prompts)
    if legs_bytes > limits.legs_bytes:
        all_legs = f"{units} requests with {len(common)} bytes in common are {legs_bytes} bytes"
        most = f"over the limit of {limits.legs_bytes}"
        raise bad_request(f"{all_legs} for the engines, {most}")
    return Plan(
        kind=kind,
        stream=stream,
        units=Units(own_limits, samples),
        prompts=tuple(prompts),
        common=common,
        samples=samples,
        as_list=as_list,
        merge_logprobs=merge,
        may_ask_cached=kind != "generate" and ASK_CACHED not in body,
        stream_options=None if options is None else bytes(options),
        client_rids=rids_of(rid, units),
        model=text_of(body, "model") if kind != "generate" else "",
        session=session_of(body),
        priority=priority_of(body),
    )
