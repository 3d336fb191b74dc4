"""SGLang engines on CPU come up from the project's own files and serve PD requests."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import aiohttp
import pytest
from cluster_requests import (
    CHUNKED_PREFILL_SIZE,
    generate,
    random_prompt,
    send_legs,
)

from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import InstancePlan, Role

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

NEW_TOKENS = 12
RANK_PAIRS = list(itertools.product(range(2), range(2)))
# One token, within one chunk of a rank, and over several chunks.
PROMPT_LENGTHS = (1, 40, 333, CHUNKED_PREFILL_SIZE + 77)


async def server_info(http: aiohttp.ClientSession, instance: InstancePlan) -> dict[str, Any]:
    async with http.get(f"{instance.url}/server_info") as response:
        info = await response.json()
        assert isinstance(info, dict)
        return info


async def test_engines_have_their_role_and_dp_attention(
    real_cluster: LocalCluster, http: aiohttp.ClientSession
) -> None:
    modes = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.UNIFIED: "null"}
    for instance in real_cluster.instances:
        info = await server_info(http, instance)
        assert info["disaggregation_mode"] == modes[instance.role], instance.name
        assert info["attn_dp_size"] == instance.ranks == 2, instance.name
        assert info["chunked_prefill_size"] == CHUNKED_PREFILL_SIZE // 2, instance.name


async def test_tokens_through_pd_are_those_of_one_engine(
    real_cluster: LocalCluster, http: aiohttp.ClientSession
) -> None:
    plan = real_cluster.plan
    (prefill,), (decode,), (unified,) = map(plan.of_role, (Role.PREFILL, Role.DECODE, Role.UNIFIED))
    outputs = set()
    for seed, (length, ranks) in enumerate(itertools.product(PROMPT_LENGTHS, RANK_PAIRS)):
        prompt = random_prompt(seed, length)
        alone = await generate(http, unified.url, prompt, NEW_TOKENS)
        _prefill_reply, pair = await send_legs(http, prefill, decode, prompt, NEW_TOKENS, *ranks)
        assert pair["output_ids"] == alone["output_ids"], (length, ranks)
        assert len(pair["output_ids"]) == NEW_TOKENS
        outputs.add(tuple(pair["output_ids"]))
    # Equality says nothing if the model answers every prompt alike.
    assert len(outputs) == len(PROMPT_LENGTHS) * len(RANK_PAIRS)


async def test_tokens_do_not_depend_on_the_batch(
    real_cluster: LocalCluster, http: aiohttp.ClientSession
) -> None:
    plan = real_cluster.plan
    (prefill,), (decode,), (unified,) = map(plan.of_role, (Role.PREFILL, Role.DECODE, Role.UNIFIED))
    prompts = [random_prompt(100 + index, 20 + 60 * index) for index in range(8)]
    alone = [await generate(http, unified.url, prompt, NEW_TOKENS) for prompt in prompts]
    together = await asyncio.gather(
        *(
            send_legs(
                http, prefill, decode, prompt, NEW_TOKENS, *RANK_PAIRS[index % len(RANK_PAIRS)]
            )
            for index, prompt in enumerate(prompts)
        )
    )
    assert [reply["output_ids"] for _prefill_reply, reply in together] == [
        reply["output_ids"] for reply in alone
    ]


async def test_virtual_gpu_serves_every_prefill_and_decode_rank(
    virtual_cluster: LocalCluster, http: aiohttp.ClientSession
) -> None:
    prefills = virtual_cluster.plan.of_role(Role.PREFILL)
    (decode,) = virtual_cluster.plan.of_role(Role.DECODE)
    assert len(prefills) == 3
    prompt = random_prompt(7, 100)
    replies = await asyncio.gather(
        *(
            send_legs(http, prefill, decode, prompt, NEW_TOKENS, *ranks)
            for prefill in prefills
            for ranks in RANK_PAIRS
        )
    )
    outputs = [reply["output_ids"] for _prefill_reply, reply in replies]
    assert len(outputs[0]) == NEW_TOKENS
    assert all(output == outputs[0] for output in outputs)


async def test_virtual_gpu_chunks_prompts_and_reuses_their_prefix(
    virtual_cluster: LocalCluster, http: aiohttp.ClientSession
) -> None:
    prefill = virtual_cluster.plan.of_role(Role.PREFILL)[0]
    (decode,) = virtual_cluster.plan.of_role(Role.DECODE)
    prompt = random_prompt(8, 2 * CHUNKED_PREFILL_SIZE)
    first, _decode_reply = await send_legs(http, prefill, decode, prompt, NEW_TOKENS, 1, 1)
    again, _decode_reply = await send_legs(http, prefill, decode, prompt, NEW_TOKENS, 1, 1)
    assert first["meta_info"]["prompt_tokens"] == len(prompt)
    # Prompts of other tests may begin with the same few tokens.
    assert first["meta_info"]["cached_tokens"] < 16
    # Engines compute at least the last token of a prompt they know.
    assert again["meta_info"]["cached_tokens"] == len(prompt) - 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_logprobs_num": 2},
        {"logprob_start_len": 0, "top_logprobs_num": 2},
    ],
    ids=["output", "top", "prompt"],
)
async def test_virtual_gpu_survives_requests_for_log_probabilities(
    virtual_cluster: LocalCluster, http: aiohttp.ClientSession, fields: dict[str, int]
) -> None:
    prefill = virtual_cluster.plan.of_role(Role.PREFILL)[0]
    (decode,) = virtual_cluster.plan.of_role(Role.DECODE)
    prompt = random_prompt(9, CHUNKED_PREFILL_SIZE)
    _prefill_reply, reply = await send_legs(
        http, prefill, decode, prompt, NEW_TOKENS, return_logprob=True, **fields
    )
    assert len(reply["meta_info"]["output_token_logprobs"]) == NEW_TOKENS
