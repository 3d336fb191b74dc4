"""Hostile and unlucky peers: garbage from engines, clients that stall, keys, headers, bodies."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_harness import cluster, options_for, sse_events, until
from test_upstream import raw_server, read_request

from sglang_sbs.router.client import answer_stream, intake
from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.client.intake import Doorman
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.processes.messages import decode_to_scheduler, encode
from sglang_sbs.router.prompts.block_names import BlockNamer
from sglang_sbs.router.prompts.length_estimate import PromptLengths
from sglang_sbs.router.prompts.reader import PromptReader
from sglang_sbs.router.relay import aborts
from sglang_sbs.router.requests.headers import forwarded_headers
from sglang_sbs.router.requests.legs import leg_bodies
from sglang_sbs.router.requests.plan import _INTERNAL_FIELDS, plan_request
from sglang_sbs.router.server import RouterServer
from sglang_sbs.router.workers.breaker import Breaker
from sglang_sbs.router.workers.placement import Placement
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import RequestArrived
from tools.stand_ins.mock_engine import Behaviour, MockEngine

GARBAGE = [b"data: {not json\n\n", b"data: [1]\n\n", b"\x00\xff", b'{"text": 5', b"[]"]


# Engines that answer nonsense -------------------------------------------------------------------


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "extra", [{"return_logprob": True}, {"rid": "mine"}], ids=["logprob", "rid"]
)
async def test_garbage_from_decode_that_must_be_edited_is_a_failure_not_a_hang(
    garbage: bytes, stream: bool, extra: dict[str, Any]
) -> None:
    async with cluster("--disable-retries") as c:
        c.decode[0].behaviour = Behaviour(garbage=garbage)
        async with c.post("/generate", {"text": "x", "stream": stream} | extra) as response:
            body = await response.read()
        if response.status == 200:
            assert stream
            events = sse_events(body)
            unreadable = garbage.startswith(b"data:")  # else it holds no event at all
            assert ("error" in events[-1]) == unreadable
        else:
            assert orjson.loads(body)["error"]["code"] == "decode_server_error"
        await c.settled()
        c.check_books()


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_from_prefill_is_a_failure(garbage: bytes) -> None:
    async with cluster("--disable-retries") as c:
        c.decode[0].gate.close()
        c.prefill[0].behaviour = Behaviour(garbage=garbage)
        status, body = await c.generate(text="x")
        assert (status, body["error"]["code"]) == (502, "prefill_server_error")
        await c.settled()
        c.check_books()


async def test_a_defect_after_the_first_byte_ends_the_stream_with_an_event(
    monkeypatch: Any,
) -> None:
    async with cluster() as c:

        async def broken(exchange: Any) -> Any:
            await exchange.downstream.open("text/event-stream")
            exchange.downstream.push(b"data: {}\n\n")
            raise ZeroDivisionError

        monkeypatch.setattr(c.server.relay, "_answer", broken)
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            events = sse_events(await response.read())
        assert events[0] == {}
        assert events[1]["error"]["code"] == "internal_error"


async def test_an_engine_that_never_answers_an_abort_keeps_no_connection(monkeypatch: Any) -> None:
    monkeypatch.setattr(aborts, "ANSWER_S", 0.05)
    asked = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        await reader.read()
        writer.close()

    async with cluster() as c, raw_server(serve) as (origin, _):
        before = c.server.pool.open_connections
        c.server.in_flight.aborts.send(origin, "r")
        await asked.wait()
        await until(lambda: c.server.pool.open_connections == before)


async def test_a_defect_while_watching_a_worker_is_not_the_end_of_watching_it(
    monkeypatch: Any, caplog: Any
) -> None:
    engine = MockEngine("decode")
    await engine.start()
    async with cluster() as c:
        described = c.server.registry.described
        defects = [KeyError("defect")]

        def broken(worker: Any, info: Any) -> None:
            if defects:
                raise defects.pop()
            described(worker, info)

        monkeypatch.setattr(c.server.registry, "described", broken)
        worker = await c.server.add_worker(engine.url, "decode", None)
        await until(lambda: worker.usable)
        assert "beginning anew" in caplog.text
    await engine.stop()


# Clients that stall -----------------------------------------------------------------------------


async def test_a_client_that_stops_reading_is_let_go_after_the_request_timeout(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(answer_stream, "FINISH_S", 0.05)
    async with cluster("--request-timeout-secs", "1", "--max-concurrent-requests", "1") as c:
        c.decode[0].behaviour = Behaviour(tokens=6000)
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port, limit=1024)
        body = orjson.dumps({"text": "x", "stream": True})
        writer.write(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await reader.read(1)
        await until(lambda: c.server.in_flight.client_requests == 0)
        assert c.server.admission.running == 0
        c.check_books()
        writer.close()


class FakeSource:
    def __init__(self) -> None:
        self.paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


class FakeClient:
    """A client, and its transport, that reads when told to."""

    chunked = True

    def __init__(self) -> None:
        self.unread = 0
        self.transport = self

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def write(self, data: bytes) -> None:
        self.unread += len(data)


async def test_every_source_of_a_slow_client_is_paused_also_late_ones() -> None:
    client, sources = FakeClient(), {0: FakeSource()}
    stream = Downstream(client, sources)  # type: ignore[arg-type]
    stream._transport = client  # type: ignore[assignment]
    stream.push(bytes(answer_stream.HIGH_WATER_BYTES + 1))
    assert sources[0].paused
    sources[1] = FakeSource()
    stream.push(b"x")
    assert sources[1].paused
    client.unread = 0
    await until(lambda: not any(source.paused for source in sources.values()))


async def test_sources_are_paused_also_while_the_head_is_on_its_way() -> None:
    client, sources = FakeClient(), {0: FakeSource()}
    stream = Downstream(client, sources)  # type: ignore[arg-type]
    stream.push(bytes(answer_stream.HIGH_WATER_BYTES + 1))
    assert sources[0].paused
    stream._transport = client  # type: ignore[assignment]
    await until(lambda: not sources[0].paused)


async def test_a_body_that_does_not_come_is_a_408(monkeypatch: Any) -> None:
    monkeypatch.setattr(intake, "GRACE_S", 0.05)
    async with cluster() as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        await until(lambda: c.server.in_flight.client_requests == 0)


async def test_a_declared_length_over_the_limit_is_refused_without_reading() -> None:
    async with cluster("--max-payload-size", "1000") as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()


async def test_connections_that_send_no_whole_head_are_closed() -> None:
    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            doorman.watch(transport)
            made.append(transport)

    made: list[asyncio.BaseTransport] = []
    doorman = Doorman(patience_s=0.05)
    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    silent, silent_writer = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: len(made) == 1)
    talking, talking_writer = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: len(made) == 2)
    doorman.heard(made[1])
    silent_writer.write(b"POST /gen")
    with pytest.raises(ConnectionResetError):
        assert await silent.read() == b""
        raise ConnectionResetError
    assert not talking.at_eof()
    assert doorman._silent.since_s == {}
    silent_writer.close()
    talking_writer.close()
    server.close()


async def test_a_client_that_takes_nothing_of_its_answer_is_waited_for_once() -> None:
    class Stuck(asyncio.Transport):
        aborted = False

        def is_closing(self) -> bool:
            return False

        def get_write_buffer_size(self) -> int:
            looks.append(self)
            return 1

        def abort(self) -> None:
            self.aborted = True

    looks: list[asyncio.Transport] = []
    doorman = Doorman(idle_s=0.02)
    transport = Stuck()
    doorman.rests(transport)
    await until(lambda: transport.aborted)
    assert len(looks) == 2
    assert doorman._idle.since_s == {}


# The end ----------------------------------------------------------------------------------------


async def test_while_draining_every_answer_closes_its_connection_and_uploads_are_waited_for() -> (
    None
):
    prefill, decode = MockEngine("prefill"), MockEngine("decode")
    await prefill.start()
    await decode.start()
    server = RouterServer(options_for([prefill], [decode], "--policy", "round_robin"))
    await server.start()
    await until(lambda: server.registry.ready)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = orjson.dumps({"text": "x"})
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
    await until(lambda: server.in_flight.client_requests == 1)
    stop = asyncio.create_task(server.stop(grace_s=20))
    await until(lambda: server.draining)
    writer.write(body)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in head.lower()
    assert orjson.loads(await reader.read())["text"] == "t1 t2 t3"
    await stop
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)
    writer.close()
    await prefill.stop()
    await decode.stop()


# Keys -------------------------------------------------------------------------------------------

ADMIN = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("GET", "/workers/x"),
    ("PUT", "/workers/x"),
    ("DELETE", "/workers/x"),
    ("POST", "/flush_cache"),
    ("GET", "/get_loads"),
    ("GET", "/v1/loads"),
    ("POST", "/abort_request"),
    ("GET", "/%77orkers"),
]


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize("key", [None, "user", "boss2", "bos", ""])
async def test_admin_endpoints_want_the_admin_key(method: str, path: str, key: str | None) -> None:
    async with cluster("--admin-api-key", "boss", "--api-key", "user", wait=False) as c:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with c.client.request(method, c.url + path, json={}, headers=headers) as response:
            assert response.status == 401
        assert len(c.server.registry) == 2


async def test_a_key_of_odd_bytes_is_a_401_and_no_traceback(caplog: Any) -> None:
    async with cluster("--api-key", "user", wait=False) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(b"GET /workers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
    assert not [r for r in caplog.records if r.exc_info]


async def test_keys_are_never_logged(caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    key = "k3y-of-the-user"
    headers = {"Authorization": f"Bearer {key}"}
    async with cluster("--api-key", key, "--admin-api-key", "k3y-of-the-boss") as c:
        response = await c.client.post(c.url + "/generate", json={"text": "x"}, headers=headers)
        assert response.status == 200
        await response.read()
    assert "k3y-of" not in caplog.text


async def test_server_info_does_not_hand_out_the_engines_keys() -> None:
    async with cluster() as c:
        c.prefill[0]._server_info = {
            "api_key": "hidden-1",
            "admin_api_key": "hidden-2",
            "ssl_keyfile_password": "hidden-3",
            "internal_states": [{"api_key": "hidden-4", "max_total_num_tokens": 7}],
        }
        async with c.get("/server_info") as response:
            text = await response.text()
        assert "hidden" not in text
        assert orjson.loads(text)["prefill"][0]["internal_states"][0]["max_total_num_tokens"] == 7


# Bodies and headers -----------------------------------------------------------------------------

PREFILL = Worker(
    url="http://10.0.0.1:30000",
    role="prefill",
    breaker=Breaker(BreakerConfig()),
    configured_bootstrap_port=8998,
)
PLACEMENT = Placement(PREFILL, 1, PREFILL, 3)
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
    for prompt in READER._read_all(plan, None, None):
        assert prompt.length.tokens >= 1
    for unit in plan.units:
        assert unit.max_new_tokens is None or unit.max_new_tokens >= 0
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
def test_a_negative_limit_does_not_get_into_the_books(kind: Any, body: dict[str, Any]) -> None:
    plan = plan_request(kind, orjson.dumps(body))
    assert plan.units[0].max_new_tokens == 0
    assert b"-7" in plan.common  # the engine is the one to refuse it


@pytest.mark.parametrize("limit", [(1 << 53) - 1, 1 << 63, (1 << 64) - 1])
def test_a_limit_beyond_all_counts_gets_to_the_scheduler_process(limit: int) -> None:
    """It would drop the message, and the client would wait for nothing."""
    raw = b'{"text": "x", "sampling_params": {"max_new_tokens": %d}}' % limit
    plan = plan_request("generate", raw)
    (unit,) = plan.units
    arrived = RequestArrived(rid="r", prompt_tokens=1, max_new_tokens=unit.max_new_tokens)
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
    lines = forwarded_headers([("Authorization", bad), ("X-Request-Id-A", bad)], bad)
    assert lines == b""
    assert (
        forwarded_headers([("TraceParent", "t")], "id") == b"x-request-id: id\r\ntraceparent: t\r\n"
    )


@pytest.mark.parametrize("name", ["X-Data-Parallel-Rank", "x-DATA-parallel-rank", "X-Override-A"])
def test_routing_headers_are_dropped_in_any_case(name: str) -> None:
    assert forwarded_headers([(name, "1")], "id") == b"x-request-id: id\r\n"


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
