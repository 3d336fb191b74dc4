"""The router's token counts against what real engines report, and answers with ids sent as ids.

1P1D that computes the model, and one ordinary engine whose answers are the measure.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.demo.runs import RouterPorts, running_router
from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, Role
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.scheduling.events import PrefillDone, RequestArrived
from tools.cpu_engine.tiny_model import cached_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

WAIT_S = 30.0
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": "What's the weather in Köln? 天気 \U0001f327 e\u0301\n"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "grey"}]}
TEXT = "the prefill of a batch and decode <|im_start|> ü\t\n" * 5
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
OPENAI = {"model": "m", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any], int]] = [
    ("/generate", {"text": TEXT, "sampling_params": GREEDY}, 1),
    ("/generate", {"text": [TEXT, "x", "漢字 " * 30], "sampling_params": GREEDY}, 3),
    ("/generate", {"text": TEXT, "sampling_params": GREEDY, "return_logprob": True}, 1),
    ("/v1/completions", OPENAI | {"prompt": TEXT}, 1),
    ("/v1/completions", OPENAI | {"prompt": [TEXT, "über"], "logprobs": 2}, 2),
    ("/v1/completions", OPENAI | {"prompt": TEXT, "echo": True}, 1),
    ("/v1/chat/completions", OPENAI | {"messages": [USER]}, 1),
    ("/v1/chat/completions", OPENAI | {"messages": [USER, CALL, RESULT], "tools": [TOOL]}, 1),
    (
        "/v1/chat/completions",
        OPENAI
        | {"messages": [USER, {"role": "assistant", "content": "It is"}]}
        | {"continue_final_message": True, "logprobs": True, "top_logprobs": 2},
        1,
    ),
    ("/v1/chat/completions", OPENAI | {"messages": [USER, CALL, RESULT, USER]}, 1),
]
TOKENIZED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/tokenize", {"prompt": TEXT}),
    ("/tokenize", {"prompt": [TEXT, "", "漢字"], "add_special_tokens": False}),
    ("/v1/tokenize", {"messages": [USER, CALL, RESULT], "tools": [TOOL]}),
    ("/v1/detokenize", {"tokens": [3, 1, 200, 511, 0, 90]}),
    ("/detokenize", {"tokens": [[1, 2, 3], [300]], "skip_special_tokens": False}),
]


async def post(
    http: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    async with http.post(url + path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer if isinstance(answer, list) else [answer]


def said(outputs: list[dict[str, Any]]) -> list[Any]:
    """Return the parts of an answer that a client reads: texts, tokens, reasons and counts."""
    found: list[Any] = []
    for output in outputs:
        for choice in output.get("choices", []):
            found.append([choice.get("text"), choice.get("message"), choice["finish_reason"]])
            found.append(tokens_of(choice.get("logprobs")))
        if "usage" in output:
            usage = output["usage"]
            found.append([usage["prompt_tokens"], usage["completion_tokens"]])
        else:
            meta = output["meta_info"]
            found.append([output["text"], output["output_ids"], meta["finish_reason"]])
            found.append([meta["prompt_tokens"], meta["completion_tokens"]])
    return found


def tokens_of(logprobs: Any) -> Any:
    """The tokens of a choice's logprobs, as text."""
    if logprobs is None:
        return None
    if logprobs.get("content"):
        return [token["token"] for token in logprobs["content"]]
    return logprobs["tokens"]


async def test_counts_are_the_engines_and_ids_change_no_answer(
    real_cluster: LocalCluster, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    (unified,) = real_cluster.plan.of_role(Role.UNIFIED)
    expected = [said(await post(http, unified.url, path, body)) for path, body, _ in REQUESTS]
    first = next(free_port_blocks(PORTS_PER_INSTANCE))
    ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
    log = tmp_path / "router.events"
    flags = ["--policy", "sbs", "--sbs-event-log", str(log)]
    flags += ["--tokenizer-path", str(cached_tiny_model())]
    async with running_router(real_cluster.instances, ports, flags, tmp_path) as url:
        router_log = tmp_path / "router.log"
        async with asyncio.timeout(WAIT_S):
            while router_log.read_text().count("is tokenized the same, chats the same") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for path, body in TOKENIZED:
            wanted = await post(http, unified.url, path, body)
            assert await post(http, url, path, body) == wanted, (path, body)
        answers = [said(await post(http, url, path, body)) for path, body, _ in REQUESTS]
        metrics = f"http://127.0.0.1:{ports.prometheus}/metrics"
        async with http.get(metrics) as response:
            page = await response.text()
    for (path, body, _), answer, wanted in zip(REQUESTS, answers, expected, strict=True):
        assert answer == wanted, (path, body)
    sent = sum(count for _, body, count in REQUESTS if not body.get("echo"))
    assert f"sbs_requests_sent_as_ids_total {float(sent)}" in page
    assert "sbs_prompts_contradicted_total 0.0" in page
    arrived: dict[str, int] = {}
    reported: dict[str, int | None] = {}
    for record in read_event_log(log):
        if isinstance(record.event, RequestArrived):
            arrived[record.event.rid] = record.event.prompt_tokens
        elif isinstance(record.event, PrefillDone) and record.event.prompt_tokens is not None:
            reported[record.event.rid] = record.event.prompt_tokens
    assert len(arrived) == sum(count for _, _, count in REQUESTS)
    assert reported == arrived
