"""``POST /v1/messages/count_tokens``: one engine counts, whatever its role."""

from __future__ import annotations

from typing import Any

import pytest
from router_harness import Cluster, cluster

from sglang_sbs.router.api import messages
from sglang_sbs.router.engines import control_requests
from sglang_sbs.scheduling.events import RequestArrived
from tools.stand_ins.mock_engine import Behaviour

PATH = "/v1/messages/count_tokens"
BODY = {"model": "mock", "messages": [{"role": "user", "content": "x"}] * 3}


async def count(c: Cluster, body: Any = BODY, **kwargs: Any) -> tuple[int, Any]:
    async with c.post(PATH, body, **kwargs) as response:
        return response.status, await response.json()


def asked(c: Cluster) -> int:
    return sum(engine.hits.get(PATH, 0) for engine in (*c.prefill, *c.decode))


async def test_count_tokens_asks_one_engine_and_schedules_nothing() -> None:
    async with cluster() as c:
        assert await count(c) == (200, {"input_tokens": 3})
        assert asked(c) == 1
        assert not c.scheduler.of(RequestArrived)


async def test_another_engine_is_asked_when_one_is_gone() -> None:
    async with cluster() as c:
        c.prefill[0].raw_answers[PATH] = b""
        assert await count(c) == (200, {"input_tokens": 3})
        c.decode[0].raw_answers[PATH] = b"HTTP/1.1 200 OK\r\n\r\nno json"
        status, answer = await count(c)
        assert (status, answer["error"]["type"]) == (502, "api_error")


async def test_a_text_that_keeps_one_engine_busy_goes_to_no_other() -> None:
    async with cluster(relay={"count_tokens_s": 0.2}) as c:
        c.prefill[0].freeze()
        status, answer = await count(c)
        c.prefill[0].thaw()
        assert (status, answer["error"]["type"]) == (504, "timeout_error")
        assert "did not count the tokens within 0.2 s" in answer["error"]["message"]
        assert c.decode[0].hits.get(PATH, 0) == 0


async def test_a_refusal_is_passed_on_in_anthropics_form() -> None:
    async with cluster() as c:
        for engine in (*c.prefill, *c.decode):
            engine.behaviour = Behaviour(status=400)
        status, answer = await count(c)
        assert status == 400
        error = {"type": "invalid_request_error", "message": "scripted error"}
        assert answer == {"type": "error", "error": error}
        assert asked(c) == 1, "another engine would refuse it as well"


@pytest.mark.parametrize("value", ["\u5168", "\u5168x-override-rid: evil", "\x85", "\u2028"])
async def test_a_headers_value_stays_one_header(value: str, monkeypatch: Any) -> None:
    """Python takes some characters for line breaks that HTTP does not: 0x85 in UTF-8, for one."""
    sent: list[dict[str, str]] = []

    async def ask(*args: Any, **kwargs: Any) -> tuple[int, bytes]:
        sent.append(kwargs["headers"])
        return await control_requests.ask(*args, **kwargs)

    monkeypatch.setattr(messages, "ask", ask)
    async with cluster() as c:
        headers = {"x-correlation-id": value, "x-request-id": "mine"}
        assert await count(c, headers=headers) == (200, {"input_tokens": 3})
    assert sent == [headers | {"Content-Type": "application/json"}]


async def test_count_tokens_needs_the_key_and_has_the_limits_of_other_requests() -> None:
    async with cluster("--api-key", "user", "--max-payload-size", "1000") as c:
        assert (await count(c))[0] == 401
        key = {"x-api-key": "user"}
        assert (await count(c, headers=key))[0] == 200
        status, answer = await count(c, {"messages": ["x" * 1000]}, headers=key)
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
    async with cluster(prefill=0, decode=0, wait=False) as c:
        status, answer = await count(c)
        assert (status, answer["error"]["type"]) == (503, "overloaded_error")
