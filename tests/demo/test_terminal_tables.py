"""The demo's output is whole in a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.demo import cli
from benchmarks.demo.load import Sample
from benchmarks.demo.passes import EngineRecord, ForwardPass
from benchmarks.demo.runs import Run
from sglang_sbs.scheduling import policy_names


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), width=80)


def printed(terminal: Console) -> str:
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


def run_of(policy: str) -> Run:
    engines = EngineRecord(chunk_tokens=512)
    for rank in ("p0/0", "p2/31", "d0/31"):
        engines.prefill_ranks[rank] = 12_345
        engines.endforward[rank] = 123_456
    engines.passes = [
        ForwardPass(instance="p0", start_s=i, end_s=i + 0.9, tokens=(512, 512)) for i in range(9)
    ]
    return Run(policy, [Sample(0.0, 100, ttft_s=123.456)] * 1000, engines)


@pytest.mark.parametrize("policy", policy_names())
def test_the_tables_of_the_demo(policy: str, terminal: Console) -> None:
    cli._print_runs([run_of("sbs"), run_of(policy)], terminal)
    check(printed(terminal), policy, "1000/1000", "123456", "12345 (123456)")


def check(text: str, *whole: str) -> None:
    assert "…" not in text
    for word in whole:
        assert word in text
    assert max(map(len, text.splitlines())) <= 80
