"""The cost of one body: memory, pieces of work on the event loop, and everybody else's turn."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
import weakref
import zlib
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp import StreamReader
from harness.memory_peak import peak_of
from router_harness import Cluster, cluster, until

from sglang_sbs.router import lanes as router_lanes
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.lanes import LONG_BYTES, Lanes, Pace
from sglang_sbs.router.options.config import BreakerConfig, RelayConfig
from sglang_sbs.router.prompts.block_names import BlockFormat, BlockNamer
from sglang_sbs.router.prompts.engine_limits import Known
from sglang_sbs.router.prompts.length_estimate import PromptLengths
from sglang_sbs.router.prompts.reader import PromptReader
from sglang_sbs.router.relay import relay
from sglang_sbs.router.requests.body_fields import MOST_FIELDS
from sglang_sbs.router.requests.plan import leg_bodies, plan_request
from sglang_sbs.router.requests.splitting import MOST_IDS_BYTES, MOST_READ_BYTES
from sglang_sbs.router.workers.breaker import Breaker
from sglang_sbs.router.workers.worker import AttemptWorkers, Worker

MIB = 1 << 20
KINDS: list[Any] = ["generate", "completions", "chat"]
PREFILL = Worker(
    url="http://10.0.0.1:30000",
    role="prefill",
    breaker=Breaker(BreakerConfig()),
    configured_bootstrap_port=8998,
)
PLACEMENT = AttemptWorkers(PREFILL, 1, PREFILL, 3)
WIDE = {f"key{number}": number for number in range(5000)}


def refused(kind: Any, raw: bytes, limits: RelayConfig | None = None) -> str:
    with pytest.raises(RouterError) as error:
        plan_request(kind, raw, limits)
    assert error.value.status == 400
    assert len(error.value.message.encode()) < 500
    return error.value.message


# Batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("generate", {"text": [""] * 16_385}),
        ("generate", {"input_ids": [[1]] * 16_385}),
        ("generate", {"input_embeds": [[[0.5]]] * 16_385}),
        ("completions", {"prompt": [""] * 16_385}),
        ("completions", {"prompt": [[1]] * 16_385}),
    ],
)
def test_a_batch_is_counted_before_it_is_built(kind: Any, own: dict[str, Any]) -> None:
    raw = orjson.dumps(WIDE | own)
    assert peak_of(lambda: refused(kind, raw)) < 4 * MIB
    assert "--sbs-max-batch" in refused(kind, raw)


@pytest.mark.parametrize("inside", [False, True], ids=["body", "sampling_params"])
def test_an_object_has_a_limit_on_its_fields(inside: bool) -> None:
    fields = dict.fromkeys(map(str, range(MOST_FIELDS + 1)), 0)
    raw = orjson.dumps({"text": "x"} | ({"sampling_params": fields} if inside else fields))
    assert f"over {MOST_FIELDS}" in refused("generate", raw)


def test_what_a_batch_shares_is_kept_once() -> None:
    body = {"text": ["a"] * 1000, "extra": "x" * 100_000, "sampling_params": {"n": 1}}
    raw = orjson.dumps(body)
    limits = RelayConfig(max_payload_bytes=250 * len(raw))
    assert peak_of(lambda: plan_request("generate", raw, limits)) < 4 * MIB
    plan = plan_request("generate", raw, limits)
    for unit in (plan.units[0], plan.units[1]):
        for leg in leg_bodies(unit, plan, PLACEMENT, rid="rid", room=5):
            assert any(piece is plan.common for piece in leg)
            assert orjson.loads(b"".join(leg))["extra"] == body["extra"]


def test_all_legs_together_have_a_limit() -> None:
    raw = orjson.dumps({"text": ["a"] * 100, "extra": "x" * 100_000})
    assert "over the limit" in refused("generate", raw, RelayConfig(max_payload_bytes=MIB // 4))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("generate", {"text": "x", "sampling_params": {"n": 11}}),
        ("completions", {"prompt": "x", "n": 11}),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "n": 11}),
    ],
)
async def test_n_has_a_limit_and_a_flag(kind: Any, body: dict[str, Any]) -> None:
    assert "--sbs-max-samples" in refused(kind, orjson.dumps(body))
    assert len(plan_request(kind, orjson.dumps(body), RelayConfig(max_samples=11)).units) == 11


async def test_the_flags_of_both_limits_count() -> None:
    async with cluster("--sbs-max-samples", "2", "--sbs-max-batch", "3") as c:
        status, _ = await c.generate(text=["a", "b"], sampling_params={"n": 2})
        assert status == 400
        status, _ = await c.generate(text="a", sampling_params={"n": 3})
        assert status == 400
        status, answers = await c.generate(text=["a", "b", "c"])
        assert (status, len(answers)) == (200, 3)


# JSON that unfolds ------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [b"[],", b'"ab",', b'{"a":1},'])
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("chat", "messages"),
        ("completions", "prompt"),
        ("generate", "extra"),
        ("generate", "text"),
        ("generate", "rid"),
        ("generate", "sampling_params"),
        ("generate", "return_logprob"),
    ],
)
def test_dense_json_takes_no_more_than_a_few_times_its_size(
    kind: Any, place: str, dense: bytes
) -> None:
    own = b"" if place in ("messages", "prompt", "text") else b'"text":"x",'
    raw = b'{%b"%b":[%b0]}' % (own, place.encode(), dense * (4 * MIB // len(dense)))

    def work() -> None:
        try:
            plan_request(kind, raw)
        except RouterError as error:
            assert error.status == 400

    assert peak_of(work) < 4 * len(raw) + 17 * MIB


def test_many_token_ids_are_a_plan_and_small() -> None:
    raw = b'{"input_ids":[' + b"70000," * 300_000 + b"1]}"
    plan = plan_request("generate", raw)
    assert len(plan.prompts[0].value) == 300_001
    assert peak_of(lambda: plan_request("generate", raw)) < 4 * len(raw)


def test_a_batch_of_token_ids_is_cut_where_it_should() -> None:
    raw = b'{"input_ids": [ [1, 2] , [3],\n[] ,[4,5,6] ] }'
    plan = plan_request("generate", raw)
    assert [list(prompt.value) for prompt in plan.prompts] == [[1, 2], [3], [], [4, 5, 6]]


@pytest.mark.parametrize(
    "ids", [b'[["a],[b"],[1]]', b"[[1],[[2],[3]]]", b"[[1],[2]],[3]]", b'[[1],"x"]']
)
def test_nonsense_among_token_ids_cannot_smuggle_fields(ids: bytes) -> None:
    for kind, name in (("generate", b"input_ids"), ("completions", b"prompt")):
        raw = b'{"%b":%b}' % (name, ids)
        try:
            plan = plan_request(kind, raw)
        except RouterError as error:
            assert error.status == 400
            continue
        for unit in plan.units:
            for leg in leg_bodies(unit, plan, PLACEMENT, rid="rid", room=5):
                assert orjson.loads(b"".join(leg))["bootstrap_room"] == 5


@pytest.mark.parametrize("rids", [["r"] * 20_000, "r" * 5000])
def test_rids_have_a_limit(rids: Any) -> None:
    assert "rid" in refused("generate", orjson.dumps({"text": "x", "rid": rids}))


@pytest.mark.parametrize("value", ["x" * MIB, [[1]] * 300_000, 5.5, {"a": "b" * MIB}])
@pytest.mark.parametrize("place", ["n", "stream", "priority", "sampling_params"])
def test_a_bad_value_is_not_quoted_whole(place: str, value: Any) -> None:
    body = {"prompt": "x"} | {place: value}
    if place == "sampling_params":
        refused("generate", orjson.dumps({"text": "x", "sampling_params": {"n": value}}))
    else:
        refused("completions", orjson.dumps(body))


def test_an_error_message_has_a_limit_wherever_it_comes_from() -> None:
    assert len(RouterError(400, "x", "y" * MIB).sse_event()) < 5000


# Content-Encoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/workers"])
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "GZIP, identity"])
async def test_a_body_that_would_unfold_is_refused(path: str, coding: str) -> None:
    bomb = zlib.compress(bytes(64 * MIB), wbits=31)
    async with cluster() as c:
        tracemalloc.start()
        headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
        async with c.client.post(c.url + path, data=bomb, headers=headers) as response:
            assert response.status == 415
            error = orjson.loads(await response.read())["error"]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert error["code"] == "unsupported_content_encoding"
        assert peak < 16 * MIB


# Unfinished bodies ------------------------------------------------------------------------------


async def unfinished(c: Cluster, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2 * size)
    writer.write(head + b" " * size)
    await writer.drain()
    return reader, writer


async def test_unfinished_bodies_cannot_take_the_room_of_all() -> None:
    async with cluster("--sbs-max-bodies-size", "1000000") as c:
        bodies = c.server.relay.bodies
        first, writer = await unfinished(c, 400_000)
        await until(lambda: bodies.held_bytes == 400_000)
        others = [await unfinished(c, 200_000) for _ in range(3)]
        await until(lambda: bodies.held_bytes == 1_000_000)
        status, _ = await c.generate(text="x")  # a small one may take a little more
        assert status == 200
        last, last_writer = await unfinished(c, 100_000)
        assert (await first.readline()).split()[1] == b"503"  # the largest has to go
        await until(lambda: bodies.held_bytes == 700_000)
        for connection in (writer, last_writer, *(other for _, other in others)):
            connection.close()
        await until(lambda: bodies.held_bytes == 0)
        assert not bodies.coming
        del last


async def test_a_body_with_no_room_gets_a_503_and_is_not_kept() -> None:
    async with cluster("--sbs-max-bodies-size", "1000000") as c:
        c.scheduler.hold = True
        inside = [asyncio.create_task(c.generate(text="x" * 450_000)) for _ in range(2)]
        await until(lambda: len(c.scheduler.held) == 2)
        status, answer = await c.generate(text="x" * 450_000)
        assert status == 503
        assert "--sbs-max-bodies-size" in answer["error"]["message"]
        for task in inside:
            task.cancel()
        await until(lambda: c.server.relay.bodies.held_bytes == 0)


# Turns ------------------------------------------------------------------------------------------


async def test_a_large_body_is_read_and_sent_in_slices(monkeypatch: Any) -> None:
    read: list[int] = []
    written: list[int] = []
    readany = StreamReader.readany

    async def noting(self: StreamReader) -> bytes:
        data = await readany(self)
        read.append(len(data))
        return data

    monkeypatch.setattr(StreamReader, "readany", noting)
    async with cluster() as c:
        made = c.server.pool.connect

        async def connect(origin: str) -> Any:
            connection = await made(origin)
            transport = connection.transport

            class Counted:
                def write(self, data: bytes) -> None:
                    written.append(len(data))
                    transport.write(data)

                def __getattr__(self, name: str) -> Any:
                    return getattr(transport, name)

            connection.transport = Counted()
            return connection

        monkeypatch.setattr(c.server.pool, "connect", connect)
        status, _ = await c.generate(text="x", more="x" * (8 * MIB))
        assert status == 200
    assert sum(read) > 8 * MIB
    assert max(read) < MIB // 2  # until that is taken, no more comes in
    assert sum(written) > 2 * 8 * MIB
    assert max(written) <= MIB
    assert len(c.decode[0].requests[0].body["more"]) == 8 * MIB


# Long texts -------------------------------------------------------------------------------------


async def test_long_work_does_not_hold_up_short_work() -> None:
    lanes, gate = Lanes(), threading.Event()
    long = [asyncio.create_task(lanes.run(LONG_BYTES, gate.wait)) for _ in range(5)]
    await asyncio.sleep(0)
    assert lanes.long_bytes == 5 * LONG_BYTES
    assert await lanes.run(1000, lambda: "short") == "short"
    gate.set()
    await asyncio.gather(*long)
    assert lanes.long_bytes == 0
    lanes.close()


def test_a_large_chat_is_measured_without_unfolding_it() -> None:
    text = "a word \U0001f600 " * (MOST_READ_BYTES // 12)
    image = {"type": "image_url", "image_url": {"url": "x" * MIB}}
    parts = [{"type": "text", "text": "word"}, image]
    messages = [{"role": "user", "content": text}, {"role": "user", "content": parts}, 5]
    raw = orjson.dumps({"messages": messages, "temperature": 0})
    plan = plan_request("chat", raw)
    assert plan.prompts[0].size_bytes == pytest.approx(len(text.encode()), rel=0.001)
    assert peak_of(lambda: plan_request("chat", raw)) < 3 * len(raw)


async def test_a_text_beyond_all_contexts_is_not_looked_at() -> None:
    plan = plan_request("generate", orjson.dumps({"text": "x" * (MOST_READ_BYTES + 1)}))
    (prompt,) = plan.prompts
    assert prompt.value is None
    no_engines: Any = None
    reader = PromptReader(None, PromptLengths(), BlockNamer(), no_engines, names_text=False)
    (read,) = reader._read_all(plan, Known())
    assert read.length.tokens == pytest.approx(MOST_READ_BYTES / 4, rel=0.01)
    assert not read.length.exact
    reader.lanes.close()


def test_token_ids_beyond_all_contexts_are_only_counted() -> None:
    count = MOST_IDS_BYTES // 2 + 5
    raw = b'{"input_ids":[' + b"7," * (count - 1) + b"7]}"
    (prompt,) = plan_request("generate", raw).prompts
    assert (prompt.value, prompt.tokens, prompt.size_bytes) == (None, count, 0)
    (prompt,) = plan_request("generate", b'{"input_ids": [1, 2 ,3 ] }').prompts
    assert prompt.value.tolist() == [1, 2, 3]


async def test_what_takes_long_to_split_is_split_in_a_thread(monkeypatch: Any) -> None:
    threads: list[str] = []

    def plan(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return plan_request(*args)

    monkeypatch.setattr(relay, "plan_request", plan)
    async with cluster() as c:
        for body in ({"text": "x"}, {"text": ["x"] * 600}, {"text": "x" * 100_000}):
            status, _ = await c.generate(**body)
            assert status == 200
    assert [name.partition("_")[0] for name in threads] == ["MainThread", "short", "short"]


async def test_a_batch_is_read_in_a_thread(monkeypatch: Any) -> None:
    threads: list[str] = []
    estimate = PromptLengths.estimate

    def estimated(lengths: PromptLengths, prompt: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return estimate(lengths, prompt)

    monkeypatch.setattr(PromptLengths, "estimate", estimated)
    async with cluster() as c:
        for count in (2, 100):
            status, _ = await c.generate(text=["x"] * count)
            assert status == 200
    assert threads == ["MainThread"] * 2 + ["short"] * 100


def test_what_waits_of_a_batch_is_small() -> None:
    plan = plan_request("generate", orjson.dumps({"text": ["x"] * 1000}))
    no_engines: Any = SimpleNamespace(takes_ids=lambda kind: False)
    reader = PromptReader(None, PromptLengths(), BlockNamer(), no_engines, names_text=True)
    reader._read_all(plan, Known(BlockFormat(16)))  # what is made once
    gc.collect()
    tracemalloc.start()
    again = plan_request("generate", orjson.dumps({"text": ["x"] * 1000}))
    read = reader._read_all(again, Known(BlockFormat(16)))
    again.forget_values()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(read) == len(again.units) == 1000
    assert kept < 200 * 1000
    reader.lanes.close()


async def test_what_was_sent_is_not_kept_while_the_answer_is_waited_for() -> None:
    async with cluster() as c:
        c.decode[0].gate.close()
        asked = asyncio.create_task(c.generate(text="x", more="y" * MIB))
        await c.decode[0].gate.arrived(1)
        (attempt,) = c.server.in_flight._attempts.values()
        pair = attempt.pair
        assert pair is not None
        assert (pair.prefill_call.payload, pair.decode_call.payload) == ((), ())
        kept = [getattr(pair, name) for name in dir(pair) if not name.startswith("__")]
        assert not any(
            value is attempt or (isinstance(value, bytes | tuple) and value) for value in kept
        )
        c.decode[0].gate.open()
        assert (await asked)[0] == 200


async def test_threads_are_there_before_they_are_wanted() -> None:
    lanes = Lanes()
    assert [len(threads._threads) for threads in (lanes._short, lanes._long)] == [2, 1]
    lanes.close()


async def test_what_is_cancelled_before_it_began_is_let_go_of() -> None:
    """Its place in the threads' queue stays, and bodies may be large."""
    lanes, gate = Lanes(), threading.Event()
    first = asyncio.create_task(lanes.run(LONG_BYTES, gate.wait))
    body = type("Body", (), {})()
    gone = weakref.ref(body)
    second = asyncio.create_task(lanes.run(LONG_BYTES, id, body))
    await asyncio.sleep(0)
    second.cancel()
    del body
    with pytest.raises(asyncio.CancelledError):
        await second
    del second
    await asyncio.sleep(0)
    gc.collect()
    assert gone() is None
    gate.set()
    assert await first
    lanes.close()


def test_long_pieces_of_work_keep_their_distance(monkeypatch: Any) -> None:
    now_s = 5.0
    monkeypatch.setattr(router_lanes, "time", SimpleNamespace(monotonic=lambda: now_s))
    pace = Pace()
    assert [pace.wait_s(25_000_000) for _ in range(3)] == pytest.approx([0.0, 0.1, 0.2])
    now_s = 6.0
    assert [pace.wait_s(25_000_000) for _ in range(2)] == pytest.approx([0.0, 0.1])
