"""Data that every request of a batch gets is bounded before it is multiplied, and stays JSON."""

from __future__ import annotations

import tracemalloc
from typing import Any

import orjson
import pytest
from router_harness import cluster

from sglang_sbs.router.engines.connection_pool import Pool
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.requests.headers import MOST_FORWARDED_CHARS, forwarded_headers
from sglang_sbs.router.requests.plan import plan_request
from sglang_sbs.router.requests.raw_json import count_outside_strings, value_of


def test_forwarded_headers_have_a_limit_together() -> None:
    value = "x" * 30_000
    few = [("x-request-id-0", value), ("x-request-id-1", value)]
    assert forwarded_headers(few, "id").count(b"\r\n") == 3
    with pytest.raises(RouterError, match="headers that engines get") as refused:
        forwarded_headers([(f"x-request-id-{n}", value) for n in range(100)], "id")
    assert (refused.value.status, refused.value.code) == (431, "headers_too_large")
    assert len(value) < MOST_FORWARDED_CHARS


async def test_headers_of_a_batch_are_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = []
    call = Pool.call

    def seen(self: Pool, origin: str, payload: Any, *args: Any, **more: Any) -> Any:
        payloads.append(payload)
        return call(self, origin, payload, *args, **more)

    monkeypatch.setattr(Pool, "call", seen)
    async with cluster() as c:
        headers = {"X-Request-Id-0": "x" * 8000}
        body = {"text": ["a", "b"]}
        async with c.client.post(f"{c.url}/generate", json=body, headers=headers) as response:
            assert response.status == 200
        got = [request.headers["x-request-id-0"] for request in c.decode[0].requests]
        assert got == ["x" * 8000] * 2
    with_headers = [piece for payload in payloads for piece in payload if b"xxxxx" in piece]
    assert len(with_headers) == 4
    assert len(set(map(id, with_headers))) == 1


def test_reading_a_text_or_counting_in_dense_json_takes_little_more_than_its_size() -> None:
    text, dense = b'"%b"' % (b"x" * 4_000_000), b'["%b"]' % b'","'.join([b"a"] * 1_000_000)
    for work, size in (
        (lambda: value_of(text), 1.1 * len(text)),
        (lambda: count_outside_strings(dense, b'["'), 0.5 * len(dense)),
    ):
        tracemalloc.start()
        try:
            work()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < size


def test_stream_options_are_small() -> None:
    body = {"text": ["a"] * 256, "stream": True, "stream_options": {"x": "y" * (1 << 20)}}
    with pytest.raises(RouterError, match="stream_options is over 1024 bytes"):
        plan_request("generate", orjson.dumps(body))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_sampling_parameters_stay_json(several: bool, n: int) -> None:
    bias = {str(token): 0.5 for token in range(200_000)}
    params = {"n": n, "max_new_tokens": 7, "logit_bias": bias}
    asked: dict[str, Any] = {"text": "x", "sampling_params": params}
    if several:
        asked = {"text": ["x", "y"], "sampling_params": [params, {"n": n}]}
    raw = orjson.dumps(asked)
    tracemalloc.start()
    try:
        plan = plan_request("generate", raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(raw)
    assert len(plan.units) == n * (1 + several)
    assert plan.prompts[0].max_new_tokens == 7


@pytest.mark.parametrize("params", [[{}, 1], "x", 3, [{}, [1]]])
def test_what_are_no_sampling_parameters_is_said(params: Any) -> None:
    with pytest.raises(RouterError, match="sampling_params"):
        plan_request("generate", orjson.dumps({"text": ["a", "b"], "sampling_params": params}))


def test_the_legs_get_the_parameters_as_they_were() -> None:
    asked = {"text": "x", "sampling_params": {"n": 2, "temperature": 0.25, "stop": ["\u00e9"]}}
    plan = plan_request("generate", orjson.dumps(asked))
    sent = orjson.loads(b"{%b}" % bytes(plan.common))
    assert sent["sampling_params"] == asked["sampling_params"] | {"n": 1}
