"""Relaying: both legs get the right fields, answers come back unchanged, the books stay true."""

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest
from router_harness import cluster, sse_events, until

from sglang_sbs.router.workers.rank_contract import pick_bootstrap_room
from sglang_sbs.scheduling.events import Dispatch, PrefillDone, RequestArrived, RequestEnded
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX, part_of_room
from tools.stand_ins.mock_engine import Behaviour

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hello there"}]}


async def test_both_legs_get_the_rank_contract() -> None:
    async with cluster() as c:
        for _ in range(6):
            status, _ = await c.generate(input_ids=[1, 2, 3])
            assert status == 200
        pairs = list(zip(c.prefill[0].requests, c.decode[0].requests, strict=True))
        assert len(pairs) == 6
        for prefill, decode in pairs:
            p, d = prefill.body, decode.body
            assert p["bootstrap_room"] == d["bootstrap_room"]
            assert 0 <= p["bootstrap_room"] < 2**63
            assert p["bootstrap_room"] % 2 == p["routed_dp_rank"]
            assert p["disagg_prefill_dp_rank"] == d["disagg_prefill_dp_rank"] == p["routed_dp_rank"]
            assert 0 <= d["routed_dp_rank"] < 4
            assert p["bootstrap_host"] == d["bootstrap_host"] == "127.0.0.1"
            assert p["bootstrap_port"] == d["bootstrap_port"] == 9000
            assert p["rid"] == d["rid"]
            assert p["rid"].startswith(SIZED_RID_PREFIX)
            part = part_of_room(p["bootstrap_room"])
            assert part.members >= 1
            assert 1 <= part.ranks <= 2
        assert len({p.body["bootstrap_room"] for p, _ in pairs}) == 6
        assert len({p.rid for p, _ in pairs}) == 6
        assert {p.body["routed_dp_rank"] for p, _ in pairs} == {0, 1}
        assert {d.body["routed_dp_rank"] for _, d in pairs} == {0, 1, 2, 3}
        c.check_books()


@pytest.mark.parametrize(
    "flags", [("--sbs-gang-gate", "off"), ("--policy", "round_robin")], ids=["off", "immediate"]
)
async def test_engines_wait_only_for_the_gangs_of_a_holding_policy(flags: tuple[str, str]) -> None:
    async with cluster(*flags) as c:
        await c.generate(input_ids=[1, 2, 3])
        (request,) = c.prefill[0].requests
        assert not request.body["rid"].startswith(SIZED_RID_PREFIX)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 7, 8, 32])
def test_rooms_are_63_bit_and_congruent_to_the_prefill_rank(dp_size: int) -> None:
    for rank in range(dp_size):
        rooms = {pick_bootstrap_room(rank, dp_size) for _ in range(50)}
        assert len(rooms) == 50
        assert all(0 <= room < 2**63 and room % dp_size == rank for room in rooms)


async def test_a_plain_answer_is_decodes_own_bytes() -> None:
    async with cluster() as c:
        async with c.post("/generate", {"text": "hi"}) as response:
            raw = await response.read()
            assert response.status == 200
            assert response.headers["Content-Type"] == "application/json"
            assert response.headers["x-request-id"].startswith("gnt-")
            assert len(response.headers["x-request-id"]) == len("gnt-") + 24
        answer = orjson.loads(raw)
        assert answer["text"] == "t1 t2 t3"
        assert answer["meta_info"]["id"] == c.decode[0].requests[0].rid
        await c.settled()
        (ended,) = c.scheduler.of(RequestEnded)
        assert (ended.outcome, ended.completion_tokens) == ("completed", 3)
        c.check_books()


async def test_a_stream_is_relayed_event_by_event_while_decode_is_still_working() -> None:
    async with cluster() as c:
        c.decode[0].token_gate.close()
        async with c.post("/generate", {"text": "hi", "stream": True}) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            first = await response.content.readuntil(b"\n\n")
            assert sse_events(first)[0]["text"] == "t1"
            c.decode[0].token_gate.open()
            rest = sse_events(await response.read())
        assert [event["text"] for event in rest[:-1]] == ["t1 t2", "t1 t2 t3"]
        assert rest[-1] == "[DONE]"
        await c.settled()
        (ended,) = c.scheduler.of(RequestEnded)
        assert (ended.outcome, ended.completion_tokens) == ("completed", 3)
        c.check_books()


async def test_decode_is_relayed_without_waiting_for_the_prefill_reply() -> None:
    async with cluster() as c:
        c.prefill[0].reply_gate.close()
        async with c.post("/generate", {"text": "hi", "stream": True}) as response:
            assert sse_events(await response.read())[-1] == "[DONE]"
        await c.settled()
        assert len(c.scheduler.of(PrefillDone)) == 1
        assert c.scheduler.ended() == ["completed"]
        c.prefill[0].reply_gate.open()


async def test_prefill_is_asked_without_streaming() -> None:
    async with cluster() as c:
        body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        async with c.post("/v1/chat/completions", body) as response:
            events = sse_events(await response.read())
        prefill, decode = c.prefill[0].requests[0].body, c.decode[0].requests[0].body
        assert prefill["stream"] is False
        assert "stream_options" not in prefill
        assert decode["stream"] is True
        assert decode["stream_options"] == {"include_usage": True}
        assert events[-2]["usage"]["completion_tokens"] == 3


async def test_prefill_done_carries_the_engines_counts() -> None:
    async with cluster() as c:
        c.decode[0].gate.close()
        c.prefill[0].behaviour = Behaviour(prompt_tokens=11, cached_tokens=4)
        task = asyncio.ensure_future(c.generate(text="x"))
        await c.decode[0].gate.arrived(1)
        await until(lambda: c.scheduler.of(PrefillDone))
        (done,) = c.scheduler.of(PrefillDone)
        assert (done.prompt_tokens, done.cached_tokens) == (11, 4)
        c.decode[0].gate.open()
        assert (await task)[0] == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_routing_internals_of_clients_never_reach_an_engine(path: str) -> None:
    own = {"/generate": {"text": "x"}, "/v1/completions": {"prompt": "x"}}.get(path, CHAT)
    forged = {
        "bootstrap_host": "evil",
        "bootstrap_port": 1,
        "bootstrap_room": 5,
        "routed_dp_rank": 17,
        "data_parallel_rank": 17,
        "disagg_prefill_dp_rank": 17,
    }
    headers = {
        "X-Data-Parallel-Rank": "17",
        "X-Override-Routed-Dp-Rank": "17",
        "Authorization": "Bearer k",
        "traceparent": "00-abc",
        "X-Request-Id": "mine-1",
        "X-Request-Id-Extra": "e",
        "Cookie": "secret",
    }
    async with cluster() as c:
        async with c.post(path, own | forged, headers=headers) as response:
            assert response.status == 200
            assert response.headers["x-request-id"] == "mine-1"
            await response.read()
        for engine in (c.prefill[0], c.decode[0]):
            (request,) = engine.requests
            assert request.body["bootstrap_host"] == "127.0.0.1"
            assert request.body["routed_dp_rank"] < engine.dp_size
            assert "data_parallel_rank" not in request.body
            assert not [name for name in request.headers if name.startswith("x-override")]
            assert "x-data-parallel-rank" not in request.headers
            assert "cookie" not in request.headers
            assert request.headers["authorization"] == "Bearer k"
            assert request.headers["traceparent"] == "00-abc"
            assert request.headers["x-request-id"] == "mine-1"
            assert request.headers["x-request-id-extra"] == "e"


async def test_the_scheduler_hears_length_and_limit() -> None:
    async with cluster() as c:
        await c.generate(input_ids=list(range(50)), sampling_params={"max_new_tokens": 9})
        async with c.post("/v1/completions", {"prompt": "x" * 400}) as response:
            await response.read()
        ids, text = c.scheduler.of(RequestArrived)
        assert (ids.prompt_tokens, ids.max_new_tokens) == (50, 9)
        assert (text.prompt_tokens, text.max_new_tokens) == (100, 16)


async def test_ids_count_where_a_request_has_a_text_as_well() -> None:
    """SGLang's ``_tokenize_one_request`` takes the ids, of each prompt in a batch."""
    async with cluster(prefill_says={"max_req_input_len": 1000}) as c:
        await c.generate(text="x", input_ids=list(range(50)))
        await c.generate(text=["x", "y"], input_ids=[[1] * 60, [2] * 70])
        await c.generate(text="x" * 40, input_ids=None)
        lengths = [event.prompt_tokens for event in c.scheduler.of(RequestArrived)]
        assert lengths == [50, 60, 70, 10]
        status, answer = await c.generate(text="x", input_ids=[1] * 1200)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        sent = c.decode[0].requests[0].body
        assert (sent["text"], sent["input_ids"]) == ("x", list(range(50)))


async def test_http_1_0_clients_get_an_unchunked_stream() -> None:
    async with cluster() as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        body = orjson.dumps({"text": "hi", "stream": True})
        head = f"POST /generate HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        raw = await reader.read()
        writer.close()
        headers, _, payload = raw.partition(b"\r\n\r\n")
        assert b"chunked" not in headers.lower()
        assert sse_events(payload)[-1] == "[DONE]"


async def test_logprobs_of_prefill_go_in_front_of_decodes() -> None:
    async with cluster() as c:
        status, answer = await c.generate(text="x", return_logprob=True)
        assert status == 200
        meta = answer["meta_info"]
        assert len(meta["input_token_logprobs"]) == 7
        assert len(meta["output_token_logprobs"]) == 3
        # Streaming: decode is first here, and must wait for prefill's logprobs.
        c.prefill[0].reply_gate.close()
        task = asyncio.ensure_future(
            c.client.post(
                c.url + "/generate", json={"text": "x", "return_logprob": True, "stream": True}
            )
        )
        await c.prefill[0].reply_gate.arrived(2)
        await c.decode[0].gate.arrived(2)
        assert not task.done()
        c.prefill[0].reply_gate.open()
        response = await task
        events = sse_events(await response.read())
        assert events[-1] == "[DONE]"
        assert all(len(e["meta_info"]["input_token_logprobs"]) == 7 for e in events[:-1])
        await c.settled()
        c.check_books()


async def test_a_client_rid_comes_back_in_the_answer() -> None:
    async with cluster() as c:
        _, answer = await c.generate(text="x", rid="my-id")
        assert answer["meta_info"]["id"] == "my-id"
        assert c.decode[0].requests[0].rid != "my-id"
        async with c.post("/generate", {"text": "x", "rid": "my-id", "stream": True}) as response:
            events = sse_events(await response.read())
        assert {event["meta_info"]["id"] for event in events[:-1]} == {"my-id"}
        assert events[-1] == "[DONE]"


async def test_large_prompts_and_large_answers_pass() -> None:
    async with cluster() as c:
        c.decode[0].behaviour = Behaviour(tokens=200_000)
        text = "long prompt ü " * 100_000
        status, answer = await c.generate(text=text)
        assert status == 200
        assert len(answer["text"]) > 1_000_000
        assert c.prefill[0].requests[0].body["text"] == text


async def test_malformed_bodies_are_400_and_never_submitted() -> None:
    cases = [
        ("/generate", b"{", "JSON"),
        ("/generate", b"[]", "object"),
        ("/generate", b"{}", "text"),
        ("/generate", b'{"text": "x", "stream": "yes"}', "stream"),
        ("/generate", b'{"text": "x", "sampling_params": {"n": 0}}', "n must"),
        ("/generate", b'{"text": ["a","b"], "sampling_params": [{}]}', "sampling_params"),
        ("/v1/chat/completions", b'{"messages": []}', "messages"),
        ("/v1/completions", b'{"prompt": []}', "prompt"),
    ]
    async with cluster() as c:
        for path, raw, word in cases:
            async with c.client.post(c.url + path, data=raw) as response:
                body = await response.json()
                assert response.status == 400, raw
                assert response.headers["X-SMG-Error-Code"] == "invalid_request"
                assert body["error"]["type"] == "Bad Request"
                assert body["error"]["param"] is None
                assert word in body["error"]["message"]
        assert c.scheduler.of(RequestArrived) == []


async def test_many_concurrent_streams_all_finish() -> None:
    async with cluster(prefill=2, decode=2) as c:

        async def ask(number: int) -> None:
            body = {"text": f"r{number}", "stream": True}
            async with c.post("/generate", body) as response:
                assert sse_events(await response.read())[-1] == "[DONE]"

        await asyncio.gather(*(ask(n) for n in range(200)))
        await c.settled()
        assert c.scheduler.ended() == ["completed"] * 200
        c.check_books()


async def test_a_rank_outside_an_instance_is_an_error_not_a_request() -> None:
    async with cluster() as c:
        place = c.scheduler._place

        def wrong(event: RequestArrived) -> Dispatch:
            command = place(event)
            assert isinstance(command, Dispatch)
            return Dispatch(
                **{f: getattr(command, f) for f in command.__struct_fields__} | {"prefill_rank": 9}
            )

        c.scheduler._place = wrong  # type: ignore[method-assign]
        status, answer = await c.generate(text="x")
        assert status == 500
        assert answer["error"]["code"] == "rank_out_of_range"
        assert c.prefill[0].requests == []
        await c.settled()
        c.check_books()


async def test_a_client_connection_is_reused_across_requests() -> None:
    async with cluster() as c:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            for stream in (True, False, True):
                body = {"text": "x", "stream": stream}
                async with session.post(c.url + "/generate", json=body) as response:
                    assert response.status == 200
                    await response.read()
        # Engine connections too: three requests in a row need one per leg.
        assert c.server.pool.open_connections == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["x", ["x", "y"]])
async def test_echoed_logprobs_of_prefill_go_in_front_of_decodes(
    prompts: str | list[str], stream: bool
) -> None:
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "stream": stream}
    wanted = [*(f"p{number}" for number in range(7)), "t1", "t2", "t3"]
    async with cluster() as c, c.post("/v1/completions", body) as response:
        raw = await response.read()
    answers = sse_events(raw)[:-1] if stream else [orjson.loads(raw)]
    got: dict[int, dict[str, list[Any]]] = {}
    for choice in (choice for answer in answers for choice in answer["choices"]):
        lists = got.setdefault(choice["index"], {"tokens": [], "token_logprobs": []})
        for name, values in lists.items():
            values.extend(choice["logprobs"][name])
    assert sorted(got) == ([0] if prompts == "x" else [0, 1])
    for lists in got.values():
        assert lists["tokens"] == wanted
        assert len(lists["token_logprobs"]) == len(wanted)


async def test_a_request_is_admitted_before_its_prompt_is_read() -> None:
    """A request that gets a 429 costs no tokenization."""
    async with cluster("--max-concurrent-requests", "1", "--queue-size", "0") as c:
        c.prefill[0].gate.close()
        first = asyncio.create_task(c.generate(text="x"))
        await c.prefill[0].gate.arrived(1)
        read = sum(c.server.prompts.counts.values())
        assert (await c.generate(text="y"))[0] == 429
        assert sum(c.server.prompts.counts.values()) == read
        c.prefill[0].gate.open()
        assert (await first)[0] == 200
