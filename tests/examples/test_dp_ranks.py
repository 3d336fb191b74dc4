"""The DP ranks that are planned are those that SGLang resolves from the same flags."""

from __future__ import annotations

import importlib.util

import pytest
from command_lines import ENGINE, Command, resolved_by_sglang

from sglang_sbs.cluster.dp_ranks import dp_ranks
from tools.cpu_engine.tiny_model import cached_tiny_model

SPELLINGS = (
    "--attn-dp-size 8",
    "--attn-dp-size=2 --attn-dp-size 4",
    "--attention-data-parallel-size 8",
    "--attn-dp 4",
    "--attn-dp-size 4 --enable-dp-attention",
    "--dp-size 8 --enable-dp-attention",
    "--dp 1 --enable-dp-attention",
    "--dp 2",
)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang's parser")
def test_dp_ranks_are_read_as_sglang_resolves_them() -> None:
    model = ("--model-path", str(cached_tiny_model()), "--device", "cpu", "--tp", "8")
    commands = [Command(ENGINE, (*model, *words.split()), {}, "") for words in SPELLINGS]
    resolved = [each["attn_dp_size"] for each in resolved_by_sglang(commands)]
    ranks = [dp_ranks(command.flags) for command in commands]
    assert resolved == [each.count if each.attention else 1 for each in ranks]
    assert ranks[-1].replicas == 2
