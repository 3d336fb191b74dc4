"""Engines that answer oddly: what a client, another request or the log may never see of it."""

from __future__ import annotations

import asyncio
import gzip
import logging
from pathlib import Path
from typing import Any

import orjson
import pytest
from router_harness import cluster, sse_events, until

from sglang_sbs.router.engines import connection, connection_pool, control_requests
from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.processes.messages import (
    MAX_MESSAGE_BYTES,
    Cluster,
    decode_from_scheduler,
    encode,
)
from sglang_sbs.router.processes.mirrored_registry import MirroredRegistry, state_of
from sglang_sbs.router.relay import leg_answers
from sglang_sbs.router.relay.merged_answers import NoAnswer, merge_answers
from sglang_sbs.router.requests.plan import plan_request
from sglang_sbs.router.telemetry.logs import set_up_logging
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import parse_server_info
from sglang_sbs.router.workers.worker import WorkerEvents

HEAD = b"HTTP/1.1 %d Odd\r\nContent-Type: application/json\r\n%b\r\n"


async def answers_on_one_connection(port: int, bodies: list[bytes]) -> list[tuple[int, bytes]]:
    """Status and body of each request, parsed strictly: bytes left over are an error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    try:
        async with asyncio.timeout(20):
            for body in bodies:
                head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                writer.write(head % len(body) + body)
                lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in lines[1:] if line)
                status = int(lines[0].split(b" ", 2)[1])
                length = 0 if status in (204, 304) else int(fields[b"content-length"])
                found.append((status, await reader.readexactly(length)))
    finally:
        writer.close()
    return found


@pytest.mark.parametrize("status", [201, 202, 204, 206, 299, 300, 302, 304, 307, 399])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engines_odd_status_is_a_502(role: str, status: int) -> None:
    """204 and 304 have no body: passed on with one they shift every later answer."""
    async with cluster("--disable-retries") as c:
        engine = getattr(c, role)[0]
        more = b"" if status in (204, 304) else b"Content-Length: 2\r\n"
        engine.raw_answers["/generate"] = HEAD % (status, more) + (b"{}" if more else b"")
        body = orjson.dumps({"text": "x"})
        (first, raw), (second, _) = await answers_on_one_connection(c.server.port, [body, body])
        assert (first, second) == (502, 502)
        error: Any = orjson.loads(raw)["error"]
        assert error["code"] == f"{role}_bad_gateway"
        assert str(status) in error["message"]
        await c.settled()
        c.check_books()


CONTENT_TYPES = [
    *(b"text/event-stream\x01", b"application/json\x7f", b"a\x0bb", b"a\x1b[2Jb", b"a\tb"),
    *(b"\x85", "ä/b".encode(), b"", b"x/" + b"y" * 9000),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("through", ["direct", "aiohttp"])
@pytest.mark.parametrize("content_type", CONTENT_TYPES, ids=range(len(CONTENT_TYPES)))
async def test_an_odd_content_type_does_not_cost_the_answer_its_head(
    content_type: bytes, through: str, stream: bool
) -> None:
    async with cluster("--disable-retries") as c:
        data = b'data: {"text": "x"}\n\ndata: [DONE]\n\n' if stream else b'{"text": "x"}'
        c.decode[0].raw_answers["/generate"] = (
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (content_type, len(data), data)
        )
        path = "/generate" if through == "direct" else "/generate?odd"
        body = {"text": "x", "stream": stream}
        async with c.client.post(c.url + path, json=body) as response:
            answer = await response.read()
            assert response.status in (200, 502)
            if response.status == 502:
                assert orjson.loads(answer)["error"]["code"] == "decode_server_error"
            else:
                assert b'"x"' in answer
            sent = response.headers["Content-Type"]
            assert sent.isprintable()
            assert len(sent) < 300
        await c.settled()
        c.check_books()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_answer_without_end_is_cut_off(role: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(leg_answers, "MAX_ANSWER_BYTES", 1 << 20)
    async with cluster("--disable-retries") as c:
        engine = getattr(c, role)[0]
        head = b"HTTP/1.1 %d Odd\r\nContent-Length: 1000000000000\r\n\r\n"
        for status in (200, 400):
            engine.raw_answers["/generate"] = head % status + b" " * (2 << 20)
            code, answer = await c.generate(text="x")
            assert code == 502
            assert "over 1 MiB" in answer["error"]["message"]
        await c.settled()
        c.check_books()


@pytest.mark.parametrize("size", [300_000, 3_000_000])
async def test_of_a_long_error_the_beginning_is_kept(size: int) -> None:
    async with cluster("--disable-retries") as c:
        text = b"no such thing " + b"x" * size
        head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(text)
        c.prefill[0].raw_answers["/generate"] = head + text
        code, answer = await c.generate(text="x")
        assert code == 400
        assert answer["error"]["message"].startswith("no such thing")
        assert len(answer["error"]["message"]) < 3000
        monkey = {"error": {"message": "y" * 20_000}}
        raw = orjson.dumps(monkey)
        c.prefill[0].raw_answers["/generate"] = (
            head.replace(b"%d" % len(text), b"%d" % len(raw)) + raw
        )
        _, answer = await c.generate(text="x")
        assert len(answer["error"]["message"]) < 3000


async def test_decode_that_does_not_wait_for_prefill_is_paused(monkeypatch: Any) -> None:
    """Events with logprobs are held until prefill has answered."""
    paused: list[bool] = []
    call = connection_pool.Call
    set_paused = call.set_paused
    monkeypatch.setattr(call, "set_paused", lambda *to: (paused.append(to[1]), set_paused(*to)))
    async with cluster() as c:
        event = b'data: {"text": "%b", "meta_info": {}}\n\n' % (b"x" * 2000)
        c.decode[0].raw_answers["/generate"] = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
            + event
            + b"data: [DONE]\n\n"
        )
        c.prefill[0].reply_gate.close()
        body = {"text": "x", "stream": True, "return_logprob": True}

        async def ask() -> bytes:
            async with c.post("/generate", body) as response:
                return bytes(await response.read())

        asked = asyncio.create_task(ask())
        await asyncio.gather(c.prefill[0].reply_gate.arrived(1), until(lambda: True in paused))
        c.prefill[0].reply_gate.open()
        assert b"xxx" in await asked
        await c.settled()
        c.check_books()


async def test_an_empty_stream_of_decode_does_not_wait_for_prefill() -> None:
    """Prefill, whose logprobs would go into it, may wait itself for what decode has left."""
    async with cluster("--disable-retries") as c:
        c.decode[0].raw_answers["/generate"] = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n"
        )
        c.prefill[0].reply_gate.close()
        async with asyncio.timeout(5):
            status, answer = await c.generate(text="x", stream=True, return_logprob=True)
        assert status == 502, answer
        assert "the stream ended before its first event" in answer["error"]["message"]
        c.prefill[0].reply_gate.open()
        await c.settled()
        c.check_books()


CONTROL = {
    "/model_info": "/model_info",
    "/get_server_info": "/server_info",
    "/engine_metrics": "/metrics",
    "/v1/loads": "/v1/loads?include=core,disagg,queues",
    "/health_generate": "/health_generate",
}
"""Endpoints that ask engines, and what they ask."""


@pytest.mark.parametrize("path", CONTROL)
async def test_a_redirect_of_an_engine_leads_nowhere(path: str) -> None:
    async with cluster(prefill=2) as c:
        first, other = c.prefill
        asked = CONTROL[path].partition("?")[0]
        first.raw_answers[asked] = b"HTTP/1.1 307 Go\r\nLocation: %b/secret\r\n\r\n" % (
            other.url.encode()
        )
        other.raw_answers["/secret"] = HEAD % (200, b"Content-Length: 13\r\n") + b'{"the": "key"}'
        async with c.get(path) as response:
            await response.read()
            assert path != "/model_info" or response.status == 502
        assert first.hits[asked] >= 1
        assert "/secret" not in other.hits


async def test_health_checks_follow_no_redirect_either() -> None:
    async with cluster(prefill=2, monitor={"health_interval_s": 0.05}) as c:
        first, other = c.prefill
        where = b"Location: %b/secret\r\nContent-Length: 0\r\n" % other.url.encode()
        first.raw_answers["/ready"] = HEAD % (302, where)
        worker = c.server.registry.get(first.url)
        assert worker is not None
        await until(lambda: not worker.healthy)
        assert "302" in worker.problems["unhealthy"]
        assert "/secret" not in other.hits


async def test_control_answers_have_an_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(control_requests, "MAX_ANSWER_BYTES", 1 << 20)
    async with cluster() as c:
        endless = HEAD % (200, b"") + b'{"a": "' + b"x" * (3 << 20)  # no length: until it ends
        c.prefill[0].raw_answers["/model_info"] = endless
        async with c.get("/model_info") as response:
            assert response.status == 502
            assert len(await response.read()) < 1000


async def test_compressed_control_answers_are_not_inflated() -> None:
    """A hundred megabytes of zeros fit into a hundred kilobytes."""
    async with cluster() as c:
        bomb = gzip.compress(b'{"pad": "' + b" " * (4 << 20) + b'"}')
        head = HEAD % (200, b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(bomb))
        c.prefill[0].raw_answers["/model_info"] = head + bomb
        async with c.get("/model_info") as response:
            assert response.status == 502
            assert len(await response.read()) < 1000


async def test_polls_have_an_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(connection_pool, "MAX_ANSWER_BYTES", 1 << 20)
    async with cluster(wait=False) as c:
        engine = c.prefill[0]
        engine.raw_answers["/v1/loads"] = HEAD % (200, b"") + b" " * (3 << 20)
        pool = connection_pool.Pool(asyncio.get_running_loop())
        with pytest.raises(connection.UpstreamError, match="over 1 MiB"):
            await connection_pool.fetch(pool, engine.url, "/v1/loads", b"", 20.0)
        assert pool.open_connections == 0


async def test_what_engines_say_starts_no_line_of_the_log(tmp_path: Path) -> None:
    """Nor does it speak to the terminal that shows it."""
    forged = "x\n2026-01-01 ERROR forged\r\x1b[2J\u2028\x85y"
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()  # pytest's would be closed
    set_up_logging("info", tmp_path)
    try:
        logger = logging.getLogger("sglang_sbs.test")
        logger.warning("worker says %s", forged)
        try:
            raise ValueError(forged)
        except ValueError:
            logger.exception("it failed")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = before
        root.setLevel(level)
    lines = (tmp_path / "router.log").read_bytes().decode().splitlines()
    assert len([line for line in lines if not line.startswith("  ")]) == 2
    assert not [line for line in lines if not line.isprintable()]
    assert "Traceback" in "".join(lines)


async def test_a_problem_is_no_longer_than_a_person_reads() -> None:
    async with cluster() as c:
        worker = next(iter(c.server.registry))
        c.server.registry.report_problem(worker, "unusable", "y" * 1_000_000)
        assert len(worker.problems["unusable"]) < 3000


def longest_info(role: str) -> dict[str, Any]:
    """Everything an engine can say of itself, of nine megabytes each."""
    long = "x" * 9_000_000
    texts = ("served_model_name", "model_path", "load_balance_method", "speculative_algorithm")
    return dict.fromkeys(texts, long) | {
        "version": "0.5." + "9" * 9_000_000,
        "disaggregation_mode": role,
        "dp_size": 2,
        "max_total_num_tokens": 1 << 62,
        "sbs": {"boot_id": long, "bind": "tcp://*:" + long, "routers": [long[:20_000]] * 1000},
        "kv_events": {
            "publisher": "zmq",
            "endpoint_port_base": 5557,
            "block_size": 16,
            "topic": long,
            "endpoint_host": long,
            "replay_endpoint_port_base": long,
        },
    }


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_front_ends_can_be_sent_an_engine_whatever_it_says_of_itself(role: Any) -> None:
    """Or with --workers N one engine would keep every front end from its scheduler."""
    registry = Registry()
    worker = registry.add("http://10.0.0.1:1", role)
    registry.described(worker, parse_server_info(longest_info(role), role))
    for kind in ("startup", "signal", "loads", "tokenizer"):
        registry.report_problem(worker, kind, "y" * 1_000_000)
    frames = encode(Cluster(workers=[state_of(worker, 0.0)] * 100))
    assert len(frames[1]) < MAX_MESSAGE_BYTES // 4
    front_end = MirroredRegistry(WorkerEvents(), BreakerConfig())
    decoded: Any = decode_from_scheduler(frames)
    front_end.follow(decoded.workers)
    assert [mirrored.info for mirrored in front_end] == [worker.info]


async def test_workers_labels_and_addresses_have_a_length() -> None:
    async with cluster() as c:
        worker = next(iter(c.server.registry))
        put = f"{c.url}/workers/{worker.id}"
        for number in range(3):
            async with c.client.put(put, json={"labels": {f"k{number}": "v" * 2000}}) as response:
                assert response.status == (202 if number < 2 else 400)
        assert set(worker.labels) == {"k0", "k1"}
        for body in (
            {"url": "http://" + "a" * 100_000, "worker_type": "prefill"},
            {"url": "http://a", "worker_type": "b" * 100_000},
        ):
            async with c.post("/workers", body) as response:
                assert response.status == 400
                assert len(await response.read()) < 500


CHOICES = [b'[{"index":0,"text":"a"},[]]', b"7", b'"x"', b"[" + b"[]," * 2_000_000 + b"0]"]


@pytest.mark.parametrize("choices", CHOICES, ids=["a list", "a number", "text", "very many"])
async def test_choices_that_are_none_are_a_502(choices: bytes) -> None:
    body = b'{"id":"x","choices":%b}' % choices
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    async with cluster() as c:
        c.decode[0].raw_answers["/v1/completions"] = head % len(body) + body
        answer = await c.post("/v1/completions", {"prompt": "x", "n": 2})
        assert answer.status == 502
        assert "the reply is not a JSON object like SGLang's" in (await answer.text())
        await until(lambda: c.server.dispatcher.open == 0)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_of_merged_answers_only_the_choices_are_touched(kind: Any) -> None:
    asked = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "n": 2}
    plan = plan_request(kind, orjson.dumps(asked))
    odd = b'{ "id": "0", "big":1234567890123456789012345678901234567890, "s":"\\u00e9",'
    choice = b'"choices" : [ {"index":0, "text":"\\u00e9", "logprob":-0.10} ], "usage":%b}'
    usages = [b'{"prompt_tokens":3,"completion_tokens":%d,"total_tokens":9}' % n for n in (4, 5)]
    merged = b"".join(merge_answers(plan, [odd + choice % usage for usage in usages]))
    assert b'"big":1234567890123456789012345678901234567890,"s":"\\u00e9"' in merged
    for index in (0, 1):
        assert b'{"index":%d,"text":"\\u00e9","logprob":-0.10}' % index in merged
    assert b'"usage":{"prompt_tokens":3,"completion_tokens":9,"total_tokens":12}' in merged


def test_dense_logprobs_of_several_megabytes_are_merged() -> None:
    plan = plan_request("chat", b'{"messages":[{"role":"user","content":"x"}],"n":2}')
    entry = b'{"token":"x","bytes":[1],"logprob":-0.1,"top_logprobs":[{"token":"x","bytes":[1]}]}'
    content = b",".join([entry] * 80_000)
    answer = b'{"choices":[{"index":0,"logprobs":{"content":[%b]}}]}' % content
    assert sum(map(len, merge_answers(plan, [answer, answer]))) > 2 * 6_000_000


def test_a_list_of_answers_is_as_they_came() -> None:
    plan = plan_request("generate", b'{"text":["x","y"]}')
    assert b"".join(merge_answers(plan, [b'{"text": "a"}', b'{"text":1e999}'])) == (
        b'[{"text": "a"},{"text":1e999}]'
    )
    with pytest.raises(NoAnswer) as caught:
        merge_answers(plan, [b"{}", b"[]"])
    assert caught.value.args[0] == 1


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nConnection: close\r\n\r\n"
FIRST = b'data: {"text": "a", "meta_info": {}}\n\n'
LAST = b"data: [DONE]\n\n"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture
def byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that engines send arrives one byte at a time."""
    received = connection.Connection.data_received

    def in_bytes(self: Any, data: bytes) -> None:
        for at in range(len(data)):
            received(self, data[at : at + 1])

    monkeypatch.setattr(connection.Connection, "data_received", in_bytes)


@pytest.mark.usefixtures("byte_by_byte")
@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\n", b": hello\n\n"])
async def test_a_stream_may_come_byte_by_byte(before: bytes, edited: bool) -> None:
    async with cluster("--disable-retries") as c:
        raw = before + FIRST + LAST
        c.decode[0].raw_answers["/generate"] = STREAM_HEAD % b"text/event-stream" + raw
        body = {"text": "x", "stream": True} | ({"rid": "mine"} if edited else {})
        async with c.post("/generate", body) as response:
            assert response.status == 200
            answer = await response.read()
        assert answer.endswith(LAST) if edited else answer == raw
        await c.settled()
        assert c.scheduler.ended() == ["completed"]
        c.check_books()


@pytest.mark.usefixtures("byte_by_byte")
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_first_event_that_is_an_error_is_answered_with_its_status(path: str) -> None:
    async with cluster("--disable-retries") as c:
        error = b'data: {"error": {"message": "no such adapter", "code": 404}}\n\n'
        c.decode[0].raw_answers[path] = STREAM_HEAD % b"text/event-stream" + error + LAST
        async with c.post(path, {"text": "x", "messages": MESSAGES, "stream": True}) as response:
            assert response.status == 404
            assert "no such adapter" in await response.text()
        await c.settled()
        c.check_books()


@pytest.mark.parametrize("more", [{}, {"rid": "mine"}], ids=["as it comes", "edited"])
@pytest.mark.parametrize("key", [(), ("--api-key", "k")], ids=["no key", "key"])
async def test_an_abort_where_prefill_wants_a_key_is_explained(
    key: tuple[str, ...], more: dict[str, Any]
) -> None:
    abort = b'data: {"text":"a","meta_info":{"finish_reason":{"type":"abort"}}}\n\n'
    async with cluster("--disable-retries", *key) as c:
        raw = STREAM_HEAD % b"text/event-stream" + FIRST + abort + LAST
        c.decode[0].raw_answers["/generate"] = raw
        headers = {"Authorization": "Bearer k"}
        body = {"text": "x", "stream": True} | more
        async with c.post("/generate", body, headers=headers) as response:
            assert response.status == 200
            events = sse_events(await response.read())
        assert events[-1] == "[DONE]"
        errors = [event for event in events[:-1] if "error" in event]
        assert len(errors) == bool(key)
        assert not errors or errors == [events[-2]]
        assert not errors or "without a key" in errors[0]["error"]["message"]
        await c.settled()
        assert c.scheduler.ended() == ["failed"]


async def test_an_end_mark_in_the_content_does_not_hide_a_cut_stream() -> None:
    async with cluster("--disable-retries") as c:
        said = b'data: {"text": "[DONE]", "meta_info": {}}\n\n'
        c.decode[0].raw_answers["/generate"] = STREAM_HEAD % b"text/event-stream" + FIRST + said
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            answer = await response.read()
        assert b"ended without [DONE]" in answer.split(b"\n\n")[-2]
        await c.settled()
        assert c.scheduler.ended() == ["failed"]
        c.check_books()


@pytest.mark.parametrize("content_type", [b"text/html", b"application/json", b"text/event-streams"])
async def test_a_stream_of_another_type_is_a_502(content_type: bytes) -> None:
    async with cluster("--disable-retries") as c:
        c.decode[0].raw_answers["/generate"] = STREAM_HEAD % content_type + FIRST + LAST
        status, answer = await c.generate(text="x", stream=True)
        assert status == 502
        assert "not an event stream" in answer["error"]["message"]
        c.decode[0].raw_answers["/generate"] = (
            STREAM_HEAD % b"Text/Event-Stream ;charset=utf-8" + FIRST + LAST
        )
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            assert response.status == 200
        await c.settled()
        c.check_books()
