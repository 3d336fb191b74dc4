"""Hostile clients over real connections: routing internals, mangled requests, oversized ones.

Whatever is sent, engines see the router's own routing only, the client gets an answer that is no
500, and nothing is left behind in any ledger.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import Any

import orjson
import pytest
from router_harness import Cluster, cluster, until

from sglang_sbs.router.processes.messages import decode_to_scheduler, encode
from sglang_sbs.router.requests.plan import _INTERNAL_FIELDS
from sglang_sbs.scheduling.events import PrefillDone, RequestArrived, RequestEnded
from tools.stand_ins.mock_engine import RecordedRequest

FORGED_HEADERS = (
    *("X-Data-Parallel-Rank", "x-data-parallel-rank", "X-DATA-PARALLEL-RANK"),
    *("X-Override-Bootstrap-Room", "x-override-routed-dp-rank", "X-Overrides"),
    *("Bootstrap-Room", "X-Forwarded-Host", "Content-Encoding", "Connection", "Cookie", "Expect-X"),
)
OWN = frozenset(
    {
        *("host", "content-type", "accept-encoding", "content-length", "x-request-id"),
        *("authorization", "x-correlation-id", "traceparent", "tracestate", "x-smg-routing-key"),
    }
)
"""Headers an engine may see."""
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "x"}),
    ("/generate", {"text": ["x", "y"], "sampling_params": [{}, {}]}),
    ("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": {"n": 2}}),
    ("/v1/completions", {"prompt": ["x", "y"], "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
]


def forged_value(rng: random.Random) -> str:
    return rng.choice(["0", "7", '"evil"', "[1, 2]", "null", "-1", '{"bootstrap_room": 1}', "1e3"])


def forged_key(rng: random.Random, name: str) -> str:
    """The name as it is, or with some of its letters escaped: to JSON it is the same."""
    if rng.random() < 0.5:
        return name
    return "".join(f"\\u{ord(c):04x}" if rng.random() < 0.3 else c for c in name)


def forged_request(rng: random.Random) -> tuple[str, dict[str, str], bytes]:
    """A valid request with routing internals in its query, headers and body, some of them twice."""
    path, body = rng.choice(BODIES)
    pairs = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()]
    for _ in range(rng.randrange(1, 8)):
        name = rng.choice(_INTERNAL_FIELDS)
        pair = f'"{forged_key(rng, name)}": {forged_value(rng)}'
        pairs.insert(rng.randrange(len(pairs) + 1), pair)
    headers = {name: "5" for name in rng.sample(FORGED_HEADERS, 4) if name != "Content-Encoding"}
    headers["Connection"] = "keep-alive, X-Data-Parallel-Rank"
    query = rng.choice(["", "?routed_dp_rank=1", "?bootstrap_room=3&x-override-a=1"])
    return path + query, headers, ("{" + ", ".join(pairs) + "}").encode()


def check_leg(request: RecordedRequest, role: str, dp_size: int, prefill_dp: int) -> None:
    names: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names.extend(name for name, _ in pairs)
        return dict(pairs)

    body = json.loads(request.raw, object_pairs_hook=note)
    internal = [name for name in names if name in _INTERNAL_FIELDS]
    assert len(internal) == len(set(internal)) == 5
    assert body["bootstrap_host"] == "127.0.0.1"
    assert body["bootstrap_port"] == 9000
    assert 0 <= body["routed_dp_rank"] < dp_size
    assert body["bootstrap_room"] % prefill_dp == body["disagg_prefill_dp_rank"]
    if role == "prefill":
        assert body["routed_dp_rank"] == body["disagg_prefill_dp_rank"]
    assert set(request.headers) <= OWN
    assert "?" not in request.path


async def check_nothing_left(c: Cluster) -> None:
    await until(lambda: c.server.in_flight.client_requests == 0)
    await c.settled()
    c.check_books()
    arrived = {event.rid for event in c.scheduler.of(RequestArrived)}
    assert arrived == {event.rid for event in c.scheduler.of(RequestEnded)}


@pytest.mark.parametrize("seed", range(4))
async def test_routing_internals_of_clients_never_reach_an_engine(seed: int) -> None:
    rng = random.Random(seed)
    async with cluster(prefill_dp=4, decode_dp=3) as c:
        for _ in range(25):
            path, headers, raw = forged_request(rng)
            async with c.client.post(c.url + path, data=raw, headers=headers) as response:
                assert response.status == 200, await response.text()
        for request in c.prefill[0].requests:
            check_leg(request, "prefill", 4, 4)
        for request in c.decode[0].requests:
            check_leg(request, "decode", 3, 4)
        assert len(c.prefill[0].requests) == len(c.decode[0].requests) >= 25
        await check_nothing_left(c)


async def raw_exchange(port: int, data: bytes, patience_s: float = 20.0) -> bytes:
    """Return the router's answer to these bytes until it closes or patience ends; then we are
    gone."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()
    try:
        async with asyncio.timeout(patience_s):
            writer.write(data)
            while piece := await reader.read(65536):
                answer += piece
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return bytes(answer)


VALID = (
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b'Content-Length: 13\r\nConnection: close\r\n\r\n{"text": "x"}'
)
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    b'Connection: close\r\n\r\nf\r\n{"prompt": "x"}\r\n0\r\n\r\n'
)
PIECES = (
    *(b"\r\n", b"\n", b"\0", b" ", b"\t", b":", b"Content-Length: 5\r\n", b"HTTP/1.0", b"{", b"["),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n", b"\xff", b"0\r\n\r\n"),
    *(b"POST /workers HTTP/1.1\r\n\r\n", b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n", b"-1"),
)


def mangled(rng: random.Random) -> bytes:
    data = bytearray(rng.choice((VALID, CHUNKED)))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 12)]
            case 2:
                data[at:at] = rng.choice(PIECES)
            case _:
                data[at:at] = data[: rng.randrange(1, 40)]
        data = data or bytearray(b"\r\n")
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
async def test_mangled_requests_leave_nothing_behind(seed: int, caplog: Any) -> None:
    rng = random.Random(seed)
    async with cluster() as c:
        for _ in range(40):
            data = mangled(rng)
            answer = await raw_exchange(c.server.port, data, 0.1)
            if answer:
                status = int(answer.split(b" ", 2)[1])
                assert status < 500 or status == 501, (data, answer)
        await check_nothing_left(c)
        assert c.server.registry.ready
        assert (await c.generate(text="still here"))[0] == 200
        assert len(c.server.registry) == 2
    assert "internal_error" not in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 17,
    ],
    ids=["header", "target", "chunk"],
)
async def test_oversized_heads_are_4xx(data: bytes) -> None:
    async with cluster() as c:
        answer = await raw_exchange(c.server.port, data, 2.0)
        assert not answer or 400 <= int(answer.split(b" ", 2)[1]) < 500
        await check_nothing_left(c)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"text": "x", "sampling_params": {"n": 1e999}}', 400),
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"text": "x", "a": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, 400),
        (b'{"text": "' + b"x" * 300_000 + b'"}', 413),
        (b'{"text": "\\ud800"}', 400),
        (orjson.dumps({"text": ["x"] * 20_000}), 400),
        (orjson.dumps({"text": "x", "sampling_params": {"n": 2**62}}), 400),
    ],
    ids=["cut", "bytes", "inf", "deep", "deeper", "large", "surrogate", "batch", "samples"],
)
async def test_hostile_bodies_are_4xx_and_submit_nothing(raw: bytes, status: int) -> None:
    async with cluster("--max-payload-size", "300000") as c:
        async with c.client.post(c.url + "/generate", data=raw) as response:
            assert response.status == status, await response.text()
            assert response.headers["X-SMG-Error-Code"]
        assert c.scheduler.of(RequestArrived) == []
        await check_nothing_left(c)


async def test_every_response_header_is_one_line_whatever_the_request_id() -> None:
    async with cluster() as c:
        for value in (b"a\tb", b"a b", "ä".encode(), b"\xff\xfe", b"x" * 4000):
            data = VALID.replace(b"Host: x\r\n", b"Host: x\r\nX-Request-Id: " + value + b"\r\n")
            answer = await raw_exchange(c.server.port, data)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), answer[:200]
            assert orjson.loads(body)["text"] == "t1 t2 t3"
        await check_nothing_left(c)


async def test_a_request_id_that_is_not_utf8_cannot_stop_the_end_of_a_request() -> None:
    """Events go to another process, to the event log and to the dashboard."""
    async with cluster() as c:
        ids = b"X-Request-Id: \xff\xfe\r\nX-Correlation-Id: \xff\r\n"
        data = VALID.replace(b"Host: x\r\n", b"Host: x\r\n" + ids)
        answer = await raw_exchange(c.server.port, data)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        assert b"x-request-id: gnt-" in answer.lower()
        await check_nothing_left(c)
        for kind in (RequestArrived, PrefillDone, RequestEnded):
            for event in c.scheduler.of(kind):
                assert decode_to_scheduler(encode(event)) == event
        (ended,) = c.scheduler.of(RequestEnded)
        assert ended.client.request_id.startswith("gnt-")


@pytest.mark.parametrize("value", [b"a miracle", b"\x99100-continue"])
async def test_an_expect_that_is_not_met_is_refused_at_both_ports(
    value: bytes, caplog: Any
) -> None:
    async with cluster() as c:
        for port in (c.server.port, c.server.prometheus_port):
            head = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: "
            data = head + value + b"\r\n\r\n"
            head, _, body = (await raw_exchange(port, data)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 417")
            assert orjson.loads(body)["error"]["code"] == "expectation_failed"
    assert not [record for record in caplog.records if record.exc_info]


async def test_what_is_no_http_is_counted_and_its_bytes_are_not_logged(caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    key = b"k3y-of-somebody"
    async with cluster() as c:
        for line in (b"Bad Header: ", b"Authorization : Bearer ", b"Authorization: Bearer \x01"):
            data = b"POST /generate HTTP/1.1\r\nHost: x\r\n" + line + key + b"\r\n\r\n"
            answer = await raw_exchange(c.server.port, data)
            assert answer.split(b" ", 2)[1] == b"400"
        await raw_exchange(c.server.port, b"\x16\x03" + key + b"\r\n\r\n")  # TLS to an HTTP port
        assert "sbs_http_malformed_total 4.0" in c.server.metrics.render().decode()
    assert "k3y" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
