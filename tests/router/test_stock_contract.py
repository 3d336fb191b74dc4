"""The same requests to ``sglang_router`` 0.3.2 and to this router, on the same kind of engines.

Needs the stock router installed. What is knowingly different is marked in the probe, must really be
different, and is a row of the table of differences in ``docs/differences.md``, with its reason.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from harness.jwt_issuer import bearer
from router_harness import TIMEOUT_S

from tools.stand_ins.mock_engine import Behaviour, MockEngine, Rooms
from tools.stand_ins.ports import free_ports

pytest.importorskip("sglang_router.sglang_router_rs")

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "x"}]}


@dataclass
class Probe:
    """One request, and how the engines behave for it."""

    name: str
    method: str
    path: str
    body: Any = None
    decode: Behaviour | None = None
    prefill: Behaviour | None = None
    kill_decode: bool = False
    compare: Callable[[Any], Any] = lambda body: body
    """Parts of the body that must be equal."""
    raw: bytes | None = None
    """Sent as it is instead of ``body``."""
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    """Sent so often at once, with decode held; compared are the sorted statuses."""
    differs: bool = False
    """Knowingly: see the table in ``docs/differences.md``."""


def keys(body: Any) -> Any:
    return sorted(body) if isinstance(body, dict) else body


def error_of(body: Any) -> Any:
    """Type, code and message; the newer ``param`` is extra."""
    return {key: body["error"][key] for key in ("type", "code", "message")}


def code_of(body: Any) -> Any:
    return body["error"]["code"]


def without_id(body: Any) -> Any:
    if "meta_info" in body:
        return body | {"meta_info": body["meta_info"] | {"id": "*"}}
    return body | {"id": "*"}


def samples(body: Any) -> Any:
    """Names, labels but for the address, and values of a Prometheus page."""
    lines = [line for line in body.splitlines() if line and not line.startswith("#")]
    return [(re.sub(r"http://[0-9.:]+", "*", left), float(v)) for left, v in map(str.split, lines)]


def choices(body: Any) -> Any:
    return len(body["choices"])


def echoed(body: Any) -> Any:
    return body["choices"][0]["logprobs"]["tokens"]


def events(body: Any) -> Any:
    out = []
    for part in body.split("\n\n"):
        payload = part.removeprefix("data: ")
        out.append(without_id(orjson.loads(payload)) if payload.startswith("{") else payload)
    return out


def worker_fields(body: Any) -> Any:
    """Return the prefill worker's stock fields with their values, without ids and addresses."""
    (worker,) = (w for w in body["workers"] if w["worker_type"] == "prefill")
    names = ("model_id", "priority", "cost", "worker_type", "is_healthy", "load")
    more = ("connection_mode", "bootstrap_port", "metadata", "disable_health_check")
    return body["total"], body["stats"], {name: worker[name] for name in names + more}


def without_ids(body: Any) -> Any:
    return {key: value for key, value in body.items() if key not in ("worker_id", "location")}


def router_fields(body: Any) -> Any:
    return {key: body[key] for key in ("router_manager", "routers_count", "workers_count")}


def words(text: str) -> Any:
    """Return a comparison of a control-plane error's first words: Rust and Python word the rest
    differently."""
    return lambda body: body["error"].startswith(text)


JSON = {"Content-Type": "application/json"}
ZERO = "00000000-0000-0000-0000-000000000000"
N_2 = CHAT | {"n": 2}
PARSED = {"text": "x", "tool_call_parser": "json", "tools": []}
RERANK = {"model": "m", "query": "x", "documents": ["a"]}
ECHO = {"model": "mock", "prompt": "x", "echo": True, "logprobs": 1}
BOOM = "boom"
NOT_A_UUID = "Invalid worker_id 'xyz' (expected UUID). Error: "

PROBES = [
    Probe("health", "GET", "/health"),
    Probe("liveness", "GET", "/liveness"),
    Probe("readiness", "GET", "/readiness"),
    Probe("models", "GET", "/v1/models", compare=lambda b: [m["id"] for m in b["data"]]),
    Probe("workers", "GET", "/workers", compare=worker_fields),
    Probe("no such worker", "GET", f"/workers/{ZERO}"),
    Probe("worker id", "GET", "/workers/xyz", compare=words(NOT_A_UUID)),
    Probe("delete id", "DELETE", "/workers/xyz", compare=words(NOT_A_UUID)),
    Probe("delete none", "DELETE", f"/workers/{ZERO}"),
    Probe("update", "PUT", "/workers/{prefill}", {"priority": 50}, compare=without_ids),
    Probe("update none", "PUT", f"/workers/{ZERO}", {"priority": 7}),
    Probe("update id", "PUT", "/workers/xyz", {"priority": 7}, compare=words(NOT_A_UUID)),
    Probe("update type", "PUT", "/workers/{prefill}", {"priority": "x"}, differs=True),
    Probe("add without url", "POST", "/workers", {"worker_type": "prefill"}, differs=True),
    Probe("patch", "PATCH", "/workers/{prefill}", {}),
    Probe("model info", "GET", "/get_model_info"),
    Probe("model info, short", "GET", "/model_info", differs=True),
    Probe("server info", "GET", "/get_server_info", compare=router_fields),
    Probe("health_generate", "GET", "/health_generate", differs=True),
    Probe("engine metrics", "GET", "/engine_metrics", compare=samples),
    Probe("abort", "POST", "/abort_request", {"rid": "nobody"}, differs=True),
    Probe("preflight", "OPTIONS", "/generate", headers={"Origin": "http://a"}),
    Probe("cut JSON", "POST", "/generate", raw=b"{", headers=JSON, differs=True),
    Probe("wrong type", "POST", "/generate", {"text": 1}, differs=True),
    Probe("no prompt", "POST", "/generate", {}, differs=True),
    Probe("no content type", "POST", "/generate", raw=b'{"text": "x"}', differs=True),
    Probe("no messages", "POST", "/v1/chat/completions", {"model": "m"}, differs=True),
    Probe("batch", "POST", "/generate", {"text": ["x", "y"]}, differs=True),
    Probe("n = 2", "POST", "/v1/chat/completions", N_2, compare=choices, differs=True),
    Probe(
        *("logprobs", "POST", "/generate", {"text": "x", "return_logprob": True}),
        compare=without_id,
    ),
    Probe("echo", "POST", "/v1/completions", ECHO, compare=echoed, differs=True),
    Probe("classify", "POST", "/v1/classify", {"model": "m", "input": "x"}, differs=True),
    Probe("responses", "POST", "/v1/responses", {"model": "m", "input": "x"}, differs=True),
    Probe("rerank", "POST", "/v1/rerank", RERANK, differs=True),
    Probe("messages", "POST", "/v1/messages", {"model": "m", "messages": []}, differs=True),
    Probe("tokenize", "POST", "/v1/tokenize", {"prompt": "x", "model": "m"}, differs=True),
    Probe("detokenize", "POST", "/v1/detokenize", {"tokens": [1], "model": "m"}, differs=True),
    Probe("tokenizers", "GET", "/v1/tokenizers"),
    Probe("add a tokenizer", "POST", "/v1/tokenizers", {"name": "a", "source": "b"}, differs=True),
    Probe("tokenizer by name", "GET", "/v1/tokenizers/x", differs=True),
    Probe("function calls", "POST", "/parse/function_call", PARSED, differs=True),
    Probe("reasoning", "POST", "/parse/reasoning", {"text": "x"}, differs=True),
    Probe("parse nothing", "POST", "/parse/nothing", {}),
    Probe("response by id", "GET", "/v1/responses/r", differs=True),
    Probe("conversations", "POST", "/v1/conversations", {}, differs=True),
    Probe("conversation", "GET", "/v1/conversations/c", differs=True),
    Probe("conversation's items", "GET", "/v1/conversations/c/items", differs=True),
    Probe("wasm", "GET", "/wasm", differs=True),
    Probe("mesh", "GET", "/ha/status", differs=True),
    Probe(
        *("decode 429", "POST", "/generate", {"text": "x"}, Behaviour(status=429, message=BOOM)),
        compare=code_of,
        differs=True,
    ),
    Probe(
        *("prefill 400", "POST", "/generate", {"text": "x"}, None, Behaviour(status=400)),
        compare=code_of,
        differs=True,
    ),
    Probe(
        *("decode aborts", "POST", "/generate", {"text": "x"}, Behaviour(abort=True)),
        differs=True,
    ),
    Probe(
        *("stream breaks", "POST", "/generate", {"text": "x", "stream": True}),
        decode=Behaviour(fault="reset_mid_body"),
        differs=True,
    ),
    Probe("loads", "GET", "/get_loads", compare=lambda b: sorted(b["workers"][0])),
    Probe(
        "flush",
        "POST",
        "/flush_cache",
        compare=lambda b: {k: b[k] for k in ("status", "message", "workers_flushed")},
    ),
    Probe("no such route", "GET", "/nothing"),
    Probe("wrong method", "GET", "/generate"),
    Probe("embeddings", "POST", "/v1/embeddings", {"model": "m", "input": "x"}, differs=True),
    Probe("generate", "POST", "/generate", {"text": "x"}, compare=without_id),
    Probe("stream", "POST", "/generate", {"text": "x", "stream": True}, compare=events),
    Probe("chat", "POST", "/v1/chat/completions", CHAT, compare=without_id),
    Probe("chat stream", "POST", "/v1/chat/completions", CHAT | {"stream": True}, compare=events),
    Probe(
        "completion",
        "POST",
        "/v1/completions",
        {"model": "mock", "prompt": "x"},
        compare=without_id,
    ),
    *(
        Probe(
            f"decode {status}",
            "POST",
            "/generate",
            {"text": "x"},
            decode=Behaviour(status=status, message="boom"),
            compare=error_of,
        )
        for status in (400, 404, 500, 503)
    ),
    Probe("decode gone", "POST", "/generate", {"text": "x"}, kill_decode=True, compare=code_of),
]

EXTRA_HEADERS = {"retry-after"}
"""Sent here only: with a 503, so that clients know when to come back."""
IGNORED_HEADERS = {"date", "server", "content-length", "vary", "x-request-id", "allow"}
IGNORED_HEADERS |= {"connection"}  # closed here after every answer


METRICS = "metric families"
"""Their types, by name."""
PATIENCE_S = 4.0
"""A request without an answer by then is one that hangs."""


Answers = dict[str, tuple[int, dict[str, str], Any]]


async def answers_of(module: str, probes: Sequence[Probe], *flags: str) -> Answers:
    """Run a router and collect its answers to all probes."""
    rooms = Rooms()
    prefill = MockEngine("prefill", dp_size=1, rooms=rooms)
    decode = MockEngine("decode", dp_size=1, rooms=rooms)
    prefill.metrics_page = "# TYPE sglang:up gauge\nsglang:up 1.0\n"
    await prefill.start()
    await decode.start()
    port, metrics_port = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--pd-disaggregation"),
        *("--prefill", prefill.url, "9000", "--decode", decode.url),
        *("--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-startup-check-interval", "1", "--disable-retries", "--log-level", "error"),
        *flags,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        # A connection per probe: one kept open may close while the next request is written to it.
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.timeout(90),
        ):
            await _until_ready(session, url)
            engines = {"prefill": prefill, "decode": decode}
            answers = {probe.name: await _ask(session, url, probe, engines) for probe in probes}
            async with session.get(f"http://127.0.0.1:{metrics_port}/metrics") as response:
                kinds = re.findall(r"(?m)^# TYPE (\S+) (\S+)$", await response.text())
            return answers | {METRICS: (200, {}, dict(kinds))}
    finally:
        process.kill()
        await process.wait()
        await prefill.stop()
        await decode.stop()


async def _until_ready(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            async with session.get(url + "/readiness") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)


async def _ask(
    session: aiohttp.ClientSession, url: str, probe: Probe, engines: dict[str, MockEngine]
) -> tuple[int, dict[str, str], Any]:
    prefill, decode = engines["prefill"], engines["decode"]
    if probe.decode is not None:
        decode.behaviours.append(probe.decode)
    if probe.prefill is not None:
        prefill.behaviours.append(probe.prefill)
    port = decode.port
    if probe.kill_decode:
        await decode.stop()
    if probe.times > 1:
        return await _crowd(session, url, probe, decode)
    path = probe.path
    if "{prefill}" in path:
        async with session.get(url + "/workers", headers=probe.headers) as response:
            workers = (await response.json())["workers"]
        path = path.format(**{worker["worker_type"]: worker["id"] for worker in workers})
    sent = {"data": probe.raw} if probe.raw is not None else {"json": probe.body}
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            session.request(probe.method, url + path, headers=probe.headers, **sent) as response,
        ):
            try:
                raw = await response.read()
            except aiohttp.ClientPayloadError:
                raw = b"(cut)"
            headers = {
                name.lower(): value
                for name, value in response.headers.items()
                if name.lower() not in IGNORED_HEADERS
            }
            status = response.status
    except TimeoutError:
        status, headers, raw = 0, {}, b"(no answer)"
    except aiohttp.ServerDisconnectedError:
        # The stock router ends a broken stream at times before it has sent the head of its answer.
        status, headers, raw = 0, {}, b"(cut)"
    if probe.kill_decode:
        await decode.start(port)
    try:
        body: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = raw.decode()
    try:
        return status, headers, probe.compare(body) if status != 404 or body else body
    except (KeyError, TypeError, AttributeError):
        return status, headers, body  # not of the form at all


async def _crowd(
    session: aiohttp.ClientSession, url: str, probe: Probe, decode: MockEngine
) -> tuple[int, dict[str, str], Any]:
    """One request after the other, none of which decode answers before all are there."""
    decode.gate.close()

    async def ask() -> int:
        async with session.post(url + probe.path, json=probe.body) as response:
            await response.read()
            return response.status

    tasks = []
    for _ in range(probe.times):
        tasks.append(asyncio.create_task(ask()))
        await asyncio.sleep(0.1)  # their order at the door
    refused = [task for task in tasks[1:] if await _over(task)]
    decode.gate.open()
    statuses = [await task for task in tasks]
    return 200, {}, {"first": statuses[0], "refused": sorted(t.result() for t in refused)}


async def _over(task: asyncio.Task[int]) -> bool:
    await asyncio.wait({task}, timeout=3.0)
    return task.done()


def check(probes: Sequence[Probe], stock: Answers, ours: Answers) -> None:
    table = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
    for probe in probes:
        stock_status, stock_headers, stock_body = stock[probe.name]
        our_status, our_headers, our_body = ours[probe.name]
        assert our_status, f"{probe.name}: no answer of this router, {our_body}"
        if probe.differs:
            assert (our_status, our_body) != (stock_status, stock_body), probe.name
            assert f"| {probe.name} |" in table, f"{probe.name}: not in docs/differences.md"
            continue
        assert our_status == stock_status, probe.name
        assert our_body == stock_body, probe.name
        missing = {
            name: value
            for name, value in stock_headers.items()
            if our_headers.get(name, "").partition(";")[0] != value.partition(";")[0]
        }
        # These are JSON, whatever the stock router labels them.
        if probe.name in ("models", "server info", "logprobs"):
            continue
        assert missing == {}, probe.name
        if stock_status != 404:
            assert set(our_headers) - set(stock_headers) <= EXTRA_HEADERS, probe.name


async def compare(probes: Sequence[Probe], *flags: str) -> tuple[Answers, Answers]:
    stock, ours = await asyncio.gather(
        answers_of("sglang_router.launch_router", probes, *flags),
        answers_of("sglang_sbs.launch_router", probes, "--sbs-endforward-bind", "none", *flags),
    )
    check(probes, stock, ours)
    return stock, ours


async def test_answers_and_metrics_are_those_of_the_stock_router() -> None:
    stock, ours = await compare(PROBES)
    families = stock[METRICS][2]
    assert "smg_http_requests_total" in families
    assert families.items() - ours[METRICS][2].items() == set()


KEY_PROBES = [
    Probe(f"{method} {path} with {key or 'no key'}", method, path, headers=bearer(key))
    for key in ("", "api", "usr", "bad")
    for method, path in (
        *(("GET", "/workers"), ("PUT", "/workers/x"), ("DELETE", f"/workers/{ZERO}")),
        *(("POST", "/flush_cache"), ("GET", "/get_loads"), ("GET", "/nothing")),
        *(("GET", "/health"), ("GET", "/get_model_info")),
    )
]
INFERENCE_KEY_PROBES = [
    Probe(
        *(f"generate with {key or 'no key'}", "POST", "/generate", {"text": "x"}),
        headers=bearer(key),
        compare=without_id,
    )
    for key in ("", "api", "adm", "usr")
]
ADMIN_PROBES = [
    Probe("admin lists", "GET", "/workers", headers=bearer("adm"), compare=worker_fields),
    Probe("admin deletes", "DELETE", f"/workers/{ZERO}", headers=bearer("adm")),
    Probe(
        *("server info without a key", "GET", "/get_server_info"),
        compare=router_fields,
        differs=True,
    ),
]


async def test_keys_and_roles_are_those_of_the_stock_router() -> None:
    keys = ("--control-plane-api-keys", "k1:svc:admin:adm", "k2:ro:user:usr", "--api-key", "api")
    await compare([*KEY_PROBES, *INFERENCE_KEY_PROBES, *ADMIN_PROBES], *keys)


async def test_the_front_door_differs_as_described() -> None:
    door = ("--max-concurrent-requests", "1", "--queue-size", "1", "--queue-timeout-secs", "1")
    await compare(
        [Probe("crowd", "POST", "/generate", {"text": "x"}, times=4, differs=True)], *door
    )
