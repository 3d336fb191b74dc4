"""Bodies and headers nobody means: no forged field reaches an engine, and what is odd is a 400."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from multidict import CIMultiDict
from router_harness import cluster, until

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.limits import MAX_COUNT
from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.processes.messages import decode_to_scheduler, encode
from sglang_sbs.router.prompts.block_names import BlockNamer
from sglang_sbs.router.prompts.engine_limits import Known
from sglang_sbs.router.prompts.length_estimate import PromptLengths
from sglang_sbs.router.prompts.reader import PromptReader
from sglang_sbs.router.requests.body_fields import typed
from sglang_sbs.router.requests.headers import forwarded_headers, in_lower_case
from sglang_sbs.router.requests.plan import _INTERNAL_FIELDS, leg_bodies, plan_request
from sglang_sbs.router.workers.breaker import Breaker
from sglang_sbs.router.workers.worker import AttemptWorkers, Worker
from sglang_sbs.scheduling.events import RequestArrived

PREFILL = Worker(
    url="http://10.0.0.1:30000",
    role="prefill",
    breaker=Breaker(BreakerConfig()),
    configured_bootstrap_port=8998,
)
PLACEMENT = AttemptWorkers(PREFILL, 1, PREFILL, 3)
NO_ENGINES: Any = None  # nothing is asked of them: no tokenizer, no blocks
READER = PromptReader(None, PromptLengths(), BlockNamer(), NO_ENGINES, names_text=False)
KINDS: list[Any] = ["generate", "completions", "chat"]
OWN: dict[str, dict[str, Any]] = {
    "generate": {"text": "x"},
    "completions": {"prompt": "x"},
    "chat": {"messages": [{"role": "user", "content": "x"}]},
}
SHARED = {"bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def escaped(name: str) -> str:
    """The same key, written with an escape."""
    return f"\\u{ord(name[0]):04x}{name[1:]}"


def with_names(raw: bytes) -> tuple[dict[str, Any], list[str]]:
    """A JSON object, and every key in it at any depth, duplicates included."""
    names: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names.extend(name for name, _ in pairs)
        return dict(pairs)

    return json.loads(raw, object_pairs_hook=note), names


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("null", None), ("true", True), (" 7 ", 7), ("-0.5", -0.5), ('"\\u00fc"', "ü")],
        *[(str(10**40), 10**40), ("1e400", math.inf), ("-1e400", -math.inf)],
    ],
)
def test_short_scalars_are_typed(text: str, value: Any) -> None:
    assert typed(Raw(text.encode())) == value


@pytest.mark.parametrize(
    "text", ["[]", '{"a": 1}', "[1e400]", '"\\ud800"', '"' + "x" * 64 + '"', "1" * 65]
)
def test_lists_objects_and_long_or_unreadable_texts_stay_json(text: str) -> None:
    raw = Raw(text.encode())
    assert typed(raw) is raw


def test_a_limit_beyond_64_bits_is_the_longest_and_such_a_priority_is_refused() -> None:
    raw = b'{"prompt": "x", "max_tokens": %d}' % 10**30
    assert plan_request("completions", raw).prompts[0].max_new_tokens == MAX_COUNT
    with pytest.raises(RouterError, match="priority must be a whole number"):
        plan_request("completions", b'{"prompt": "x", "priority": %d}' % 10**30)


@given(
    kind=st.sampled_from(KINDS),
    batch=st.booleans(),
    forged=st.lists(
        st.tuples(st.sampled_from(_INTERNAL_FIELDS), st.booleans(), json_values), max_size=6
    ),
)
def test_forged_routing_fields_never_get_into_a_leg(
    kind: Any, batch: bool, forged: list[tuple[str, bool, Any]]
) -> None:
    own: dict[str, Any] = OWN[kind]
    if batch and kind != "chat":
        own = {key: [value, value] for key, value in own.items()}
    pairs = [f'"{escaped(n) if e else n}": {orjson.dumps(v).decode()}' for n, e, v in forged]
    raw = b"{%b, %b}" % (", ".join([*pairs, '"x": 1']).encode(), orjson.dumps(own)[1:-1])
    plan = plan_request(kind, raw)
    for unit in plan.units:
        for body, rank in zip(
            leg_bodies(unit, plan, PLACEMENT, rid="r" * 32, room=5), (1, 3), strict=True
        ):
            leg, names = with_names(b"".join(body))
            assert {name: leg[name] for name in SHARED} == {
                "bootstrap_host": "10.0.0.1",
                "bootstrap_port": 8998,
                "bootstrap_room": 5,
                "disagg_prefill_dp_rank": 1,
            }
            assert leg["routed_dp_rank"] == rank
            assert not set(leg) & (set(_INTERNAL_FIELDS) - SHARED - {"routed_dp_rank"})
            assert len([n for n in names if n in _INTERNAL_FIELDS]) == len(SHARED) + 1


NAMES = (
    *("text", "input_ids", "input_embeds", "prompt", "messages", "tools", "sampling_params", "n"),
    *("rid", "stream", "stream_options", "max_tokens", "return_logprob"),
)
names = st.sampled_from(NAMES) | st.text(max_size=4)
parameters = st.fixed_dictionaries(
    {}, optional={"n": json_values, "max_new_tokens": json_values, "beam_width": json_values}
)


@given(
    kind=st.sampled_from(KINDS),
    extra=st.dictionaries(names, json_values | parameters, max_size=5),
    keep=st.booleans(),
)
def test_any_json_is_a_plan_or_a_400(kind: Any, extra: dict[str, Any], keep: bool) -> None:
    body = (OWN[kind] if keep else {}) | extra
    try:
        raw = orjson.dumps(body)
    except orjson.JSONEncodeError:
        return
    try:
        plan = plan_request(kind, raw)
    except RouterError as error:
        assert error.status == 400
        return
    for prompt in READER._read_all(plan, Known(None)):
        assert prompt.length.tokens >= 1
    for unit in plan.units:
        limit = plan.prompts[unit // plan.samples].max_new_tokens
        assert limit is None or limit >= 0
        for leg in leg_bodies(unit, plan, PLACEMENT, rid="r" * 32, room=5):
            orjson.loads(b"".join(leg))


def test_an_odd_beam_width_is_left_to_the_engine() -> None:
    plan = plan_request("generate", b'{"text": "x", "sampling_params": {"beam_width": [1]}}')
    assert len(plan.units) == 1


def test_a_list_of_sampling_params_for_one_prompt_is_a_400() -> None:
    with pytest.raises(RouterError, match="sampling_params"):
        plan_request("generate", b'{"text": "x", "sampling_params": [{"n": 2}]}')


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("generate", {"text": "x", "sampling_params": {"max_new_tokens": -7}}),
        ("completions", {"prompt": "x", "max_tokens": -7}),
        ("chat", OWN["chat"] | {"max_completion_tokens": -7}),
    ],
)
def test_a_negative_limit_is_a_400(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(RouterError, match=r"must be (at least 0|positive)"):
        plan_request(kind, orjson.dumps(body))


def test_a_negative_limit_that_may_count_does_not_get_into_the_books() -> None:
    body = OWN["chat"] | {"max_completion_tokens": -7, "max_tokens": 5}
    plan = plan_request("chat", orjson.dumps(body))
    assert plan.prompts[0].max_new_tokens == 0
    assert b"-7" in plan.common  # the engine is the one to refuse it


@pytest.mark.parametrize("limit", [(1 << 53) - 1, 1 << 63, (1 << 64) - 1])
def test_a_limit_beyond_all_counts_gets_to_the_scheduler_process(limit: int) -> None:
    """It would drop the message, and the client would wait for nothing."""
    raw = b'{"text": "x", "sampling_params": {"max_new_tokens": %d}}' % limit
    plan = plan_request("generate", raw)
    (prompt,) = plan.prompts
    arrived = RequestArrived(rid="r", prompt_tokens=1, max_new_tokens=prompt.max_new_tokens)
    assert decode_to_scheduler(encode(arrived)) == arrived
    assert b"%d" % limit in plan.common  # the engine is the one to refuse it


CLIENTS_OWN = {
    *("rid", "session_id", "text", "input_ids", "input_embeds", "image_data", "video_data"),
    *("audio_data", "mm_hashes", "mm_content_hashes", "use_audio_in_video", "video_config"),
    *("sampling_params", "watermark", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("token_ids_logprob", "return_sampling_mask", "sampling_logprobs_mode"),
    *("return_text_in_logprobs", "return_flat_raw_top_logprobs"),
    *("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64", "stream"),
    *("log_metrics", "return_hidden_states", "return_routed_experts", "routed_experts_start_len"),
    *("return_indexer_topk", "modalities", "session_params", "lora_path", "routing_key"),
    *("custom_logit_processor", "conversation_id", "require_reasoning", "max_thinking_tokens"),
    *("priority", "extra_key", "no_logs", "custom_labels", "return_entropy", "cache_salt"),
    *("return_prompt_token_ids", "max_dynamic_patch", "min_dynamic_patch", "images_config"),
    *("image_max_dynamic_patch", "video_max_dynamic_patch", "mm_processor_kwargs"),
    *("multi_item_delimiter_indices", "token_indices_to_pool"),
}
"""Fields of SGLang's ``/generate`` that a client may set."""


def test_every_field_of_sglangs_generate_is_the_clients_or_stripped() -> None:
    """A new release of SGLang may have new internals: somebody must decide."""
    spec = find_spec("sglang")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("SGLang is not installed")
    path = Path(spec.submodule_search_locations[0]) / "srt/managers/io_struct.py"
    (found,) = (
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "GenerateReqInput"
    )
    fields = {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert fields == CLIENTS_OWN | set(_INTERNAL_FIELDS)
    assert not CLIENTS_OWN & set(_INTERNAL_FIELDS)


@given(raw=st.binary(max_size=60))
def test_any_bytes_are_a_400(raw: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(RouterError) as error:
            plan_request(kind, raw)
        assert error.value.status == 400


@pytest.mark.parametrize("depth", [200, 300, 2000, 200_000])
def test_deep_json_is_a_plan_or_a_400(depth: int) -> None:
    raw = b'{"text": "x", "a": ' + b"[" * depth + b"]" * depth + b"}"
    try:
        plan_request("generate", raw)
    except RouterError as error:
        assert error.status == 400


@pytest.mark.parametrize("bad", ["a\r\nx-data-parallel-rank: 1", "a\nb", "a\rb", "a\0b"])
def test_a_header_value_stays_one_header(bad: str) -> None:
    lines = forwarded_headers([("authorization", bad), ("x-request-id-a", bad)], bad)
    assert lines == b""
    passed = in_lower_case(CIMultiDict({"TraceParent": "t"}))
    assert forwarded_headers(passed, "id") == b"x-request-id: id\r\ntraceparent: t\r\n"


@pytest.mark.parametrize("name", ["X-Data-Parallel-Rank", "x-DATA-parallel-rank", "X-Override-A"])
def test_routing_headers_are_dropped_in_any_case(name: str) -> None:
    received = in_lower_case(CIMultiDict({name: "1"}))
    assert forwarded_headers(received, "id") == b"x-request-id: id\r\n"


async def test_smuggled_requests_are_refused() -> None:
    heads = [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"Content-Length: -1\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n",
        b"X-Request-Id: a\rb\r\nContent-Length: 0\r\n\r\n",
    ]
    async with cluster() as c:
        for head in heads:
            reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\n" + head)
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()
        assert c.prefill[0].requests == c.decode[0].requests == []
        async with aiohttp.ClientSession() as client, client.get(c.url + "/health") as response:
            assert response.status == 200


@pytest.mark.parametrize("length", [8_000, 8_191, 30_000])
async def test_a_long_header_line_is_taken_as_the_stock_router_takes_it(length: int) -> None:
    async with cluster() as c, aiohttp.ClientSession() as session:
        headers = {"Cookie": "c" * length}
        url = f"{c.url}/generate"
        async with session.post(url, json={"text": "hello"}, headers=headers) as answer:
            assert answer.status == 200
        async with session.get(f"{c.url}/v1/models", headers=headers) as answer:
            assert answer.status == 200
        legs = c.prefill[0].requests + c.decode[0].requests
        assert len(legs) == 2


async def test_a_header_line_without_end_is_refused_and_not_kept() -> None:
    async with cluster() as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nCookie: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                writer.write(b"c" * 1024)
                await writer.drain()
            assert (await reader.readline()).split()[1] == b"400"
            await reader.read()
        await until(lambda: not c.server._connections())
        writer.close()
