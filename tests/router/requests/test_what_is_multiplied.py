"""What every request of a batch gets is bounded before it is multiplied, and stays JSON."""

from __future__ import annotations

import tracemalloc
from typing import Any

import orjson
import pytest

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.requests.headers import MOST_FORWARDED_CHARS, forwarded_headers
from sglang_sbs.router.requests.plan import plan_request


def test_forwarded_headers_have_a_limit_together() -> None:
    value = "x" * 30_000
    few = [("x-request-id-0", value), ("x-request-id-1", value)]
    assert forwarded_headers(few, "id").count(b"\r\n") == 3
    with pytest.raises(RouterError, match="headers that engines get") as refused:
        forwarded_headers([(f"x-request-id-{n}", value) for n in range(100)], "id")
    assert (refused.value.status, refused.value.code) == (431, "headers_too_large")
    assert len(value) < MOST_FORWARDED_CHARS


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
