"""Attacks on a router by an engine, or by a process that speaks for one."""

from __future__ import annotations

import asyncio

import msgspec
import orjson
import zmq

from benchmarks.hostile.case import Target, case
from benchmarks.hostile.dark_dns import SUFFIX
from benchmarks.raw_engine import reply
from sglang_sbs.wire import EndForward, encode_endforward

_CHAT = "/v1/chat/completions"
_DARK_S = 12.0
_CHECK_S = ("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1")


async def _ask(target: Target, answer: str, *, times: int = 1, **more: object) -> None:
    """The router is asked for something small; what its engine answers counts as sent."""
    body = {"messages": [{"role": "user", "content": "x"}], "hostile": answer, "max_tokens": 9}
    await asyncio.gather(*(target.post(orjson.dumps(body | more), _CHAT) for _ in range(times)))


@case("answer-large-event", "an SSE event of 10 MB in pieces of 1 KB")
async def large_event(target: Target) -> None:
    await _ask(target, "large event", stream=True)
    target.sent_bytes += 10_000_000


@case("answer-large-event-merged", "the same twice, in streams that are merged")
async def merged_event(target: Target) -> None:
    await _ask(target, "large event", stream=True, n=2)
    target.sent_bytes += 20_000_000


@case("answer-many-events", "100,000 SSE events in two streams that are merged")
async def many_events(target: Target) -> None:
    await _ask(target, "many events", stream=True, n=2)
    target.sent_bytes += 200_000 * 80


@case("answer-deep", "ten answers of 500,000 lists in each other")
async def deep(target: Target) -> None:
    await _ask(target, "deep", times=5, n=2)
    target.sent_bytes += 10 * 1_000_000


@case("answer-wide", "two answers of 3,300,000 empty lists")
async def wide(target: Target) -> None:
    await _ask(target, "wide", n=2)
    target.sent_bytes += 2 * 10_000_000


@case("answer-large", "four answers of 30 MB")
async def large(target: Target) -> None:
    await _ask(target, "large", times=2, n=2)
    target.sent_bytes += 4 * 30_000_000


@case("answer-prefill-large", "four answers of prefill of 30 MB, of which nothing is wanted")
async def prefill_large(target: Target) -> None:
    await _ask(target, "prefill large", times=4)
    target.sent_bytes += 4 * 30_000_000


@case("answer-logprobs", "two prompts with 20 MB of logprobs, prefill's, that go into the answer")
async def logprobs(target: Target) -> None:
    body = orjson.dumps({"text": "x", "return_logprob": True, "hostile": "logprobs"})
    await asyncio.gather(target.post(body), target.post(body))
    target.sent_bytes += 2 * 20_000_000


@case(
    "answer-needles", "800 KB of tools full of what streams are searched for; decode repeats 4 MB"
)
async def needles(target: Target) -> None:
    parameters = {"enum": ["output_tokens"] * 50_000}
    tools = [{"type": "function", "name": "f", "parameters": parameters}]
    body = {"model": "raw", "input": "x", "stream": True, "tools": tools, "hostile": "needles"}
    await target.post(orjson.dumps(body), "/v1/responses")
    target.sent_bytes += 3 * 4_000_000


@case("engine-metrics", "pages of 10 MB of two engines, asked for three times")
async def engine_metrics(target: Target) -> None:
    await asyncio.gather(*(target.get("/engine_metrics") for _ in range(3)))
    target.sent_bytes += 3 * 2 * 10_000_000


@case("server-info", "a new worker whose /server_info has 9 MB of names")
async def server_info(target: Target) -> None:
    long = "x" * 9_000_000
    info = {
        "disaggregation_mode": "decode",
        "dp_size": 1,
        "served_model_name": long,
        "version": long,
    }
    answer = reply(orjson.dumps(info))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        target.sent_bytes += len(answer)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    worker = orjson.dumps({"url": url, "worker_type": "decode"})
    kind = b"Content-Type: application/json\r\n"
    await target.post(worker, "/workers", headers=kind)
    await asyncio.sleep(3)
    await target.get("/workers")
    server.close()


async def _tell(target: Target, messages: list[list[bytes]]) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.set(zmq.SNDHWM, 0)
    try:
        socket.connect(f"tcp://127.0.0.1:{target.endforward_port}")
        await asyncio.sleep(0.5)  # until the router has subscribed
        for number, frames in enumerate(messages):
            socket.send_multipart(frames)
            target.sent_bytes += sum(map(len, frames))
            if number % 100 == 99:
                await asyncio.sleep(0.005)
        await asyncio.sleep(1.0)
    finally:
        socket.close(0)
        context.term()


def _reports(target: Target, count: int, **fields: object) -> list[list[bytes]]:
    out = []
    for seq in range(count):
        for role, port in (("prefill", target.prefill_port), ("decode", target.decode_port)):
            message = EndForward(
                instance_id=f"http://127.0.0.1:{port}",
                boot_id="x",
                role=role,  # type: ignore[arg-type]
                dp_rank=0,
                dp_size=1,
                seq=seq,
                kind="forward",
            )
            out.append(encode_endforward(msgspec.structs.replace(message, **fields)))
    return out


@case("reports-huge-counts", "20,000 EndForward messages with counts of 2^60", endforward=True)
async def huge_counts(target: Target) -> None:
    names = ("running_requests", "waiting_tokens", "waiting_requests", "kv_tokens", "extend_tokens")
    await _tell(target, _reports(target, 10_000, **dict.fromkeys(names, 1 << 60)))


@case("reports-long-lists", "20 EndForward messages with lists of 200,000", endforward=True)
async def long_lists(target: Target) -> None:
    lists = {"tokens_per_rank": [70_000] * 200_000, "rids": ["0123456789abcdef"] * 200_000}
    await _tell(target, _reports(target, 10, **lists))


@case(
    "dns-hangs",
    "eight new workers whose names' DNS does not answer",
    module="benchmarks.hostile.dark_dns",
    flags=_CHECK_S,
)
async def dns_hangs(target: Target) -> None:
    kind = b"Content-Type: application/json\r\n"
    for number in range(8):
        worker = {"url": f"http://worker-{number}{SUFFIX}:30000", "worker_type": "decode"}
        await target.post(orjson.dumps(worker), "/workers", headers=kind)
    await asyncio.sleep(_DARK_S)
