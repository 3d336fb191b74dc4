"""Length distributions, arrival processes and the two trace formats."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
from simulator_fixtures import lengths, write_azure, write_mooncake, write_turns

from sglang_sbs.scheduling import RequestArrived, SchedulerConfig
from sglang_sbs.scheduling.eventlog import MAGIC, EventLogWriter
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.workloads.arrivals import (
    TraceError,
    read_trace,
    replayed,
    synthetic,
    truncated_pareto,
    uniform_like,
)


def test_short_prompts_have_the_papers_mean():
    rng = random.Random(1)
    drawn = [uniform_like(3000)(rng) for _ in range(20_000)]
    assert min(drawn) >= 1 and max(drawn) <= 3001
    assert statistics.fmean(drawn) == pytest.approx(1000, rel=0.03)


def test_long_prompts_have_the_papers_range_and_mean():
    rng = random.Random(1)
    draw = truncated_pareto(3072, 65536, 6700.0)
    drawn = [draw(rng) for _ in range(100_000)]
    assert min(drawn) >= 3072 and max(drawn) <= 65536
    assert statistics.fmean(drawn) == pytest.approx(6700, rel=0.05)


@pytest.mark.parametrize("burstiness", [1.0, 2.0])
def test_the_rate_and_the_variation_of_arrivals_are_what_was_asked(burstiness):
    arrivals = synthetic(200.0, 100.0, uniform_like(3000), 7, burstiness=burstiness)
    gaps = [b.at_s - a.at_s for a, b in pairwise(arrivals)]
    assert len(arrivals) / 100 == pytest.approx(200, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness, rel=0.05)


def test_the_same_seed_gives_the_same_arrivals():
    runs = [synthetic(50.0, 5.0, uniform_like(3000), seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(("name", "write"), [("t.jsonl", write_mooncake), ("t.csv", write_azure)])
def test_a_trace_is_read_as_written(tmp_path, name, write):
    rows = lengths(200)
    read = read_trace(write(tmp_path / name, rows[::-1]))
    assert [a.prompt_tokens for a in read] == [i for _, i, _ in rows]
    assert [a.output_tokens for a in read] == [o for _, _, o in rows]
    assert [a.at_s for a in read] == pytest.approx([t for t, _, _ in rows], abs=1e-3)


AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": 1}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"timestamp": 0, "input_length": 3}\n', "t.jsonl:1: not a Mooncake request"),
        ("t.jsonl", "nonsense\n", "t.jsonl:1: not a Mooncake request"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n", "t.csv:2: not an Azure"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests in it"),
        ("t.csv", f"{AZURE_HEAD}2023-11-16 18:17:03,1,-5\n", "t.csv:2: .*GeneratedTokens must be"),
        ("t.csv", f"{AZURE_HEAD}\n\n{'x' * 200_000},1,1\n", "t.csv:4: .*field larger than"),
        ("t.csv", f"{'x' * 200_000}\n", "t.csv:.*field larger than"),
        ("t.jsonl", MOONCAKE % ("NaN", "1"), "t.jsonl:1: .*timestamp must be a finite number"),
        ("t.jsonl", MOONCAKE % ("0", "1e400"), "input_length must be a finite number, not inf"),
        ("t.jsonl", MOONCAKE % ("0", "1e12"), "input_length must be between 0 and 10000000"),
        ("t.jsonl", MOONCAKE % ("0", '"9"'), "input_length must be a finite number, not '9'"),
        ("t.jsonl", "[" * 100_000, "t.jsonl:1: not a Mooncake request"),
        ("t.jsonl", MOONCAKE % ("0", "1") + "\n[]\n", "t.jsonl:3: not a Mooncake request"),
        ("t.txt", "", "expected a Mooncake .jsonl, an Azure .csv trace or an event log"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "absent.csv")


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_a_trace_that_is_not_utf_8_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"TIMESTAMP\n\xff\xfe,1,1\n")
    with pytest.raises(TraceError, match=f"{name}:2: this is not UTF-8 text"):
        read_trace(path)


@pytest.mark.parametrize(("name", "write"), [("t.JSONL", write_mooncake), ("T.CSV", write_azure)])
def test_what_editors_add_to_a_trace_changes_nothing(tmp_path: Path, name: str, write) -> None:
    """A byte order mark, Windows' line ends, empty lines at the end."""
    path = write(tmp_path / name, lengths(20))
    plain = read_trace(path)
    assert len(plain) == 20
    edited = path.read_text().replace("\n", "\r\n") + "\r\n\n"
    path.write_bytes(b"\xef\xbb\xbf" + edited.encode())
    assert read_trace(path) == plain


def test_a_replayed_window_wraps_around_and_keeps_the_rate(tmp_path):
    trace = read_trace(write_mooncake(tmp_path / "t.jsonl", lengths(500)))
    rate = len(trace) / trace[-1].at_s
    for seed in range(5):
        window = replayed(trace, 3.0, 60.0, seed)
        assert all(0 <= a.at_s < 60 for a in window)
        assert window == sorted(window, key=lambda a: a.at_s)
        assert len(window) / 60 == pytest.approx(3 * rate, rel=0.15)


def test_hash_ids_are_blocks_without_the_partial_one_and_tell_the_conversation(tmp_path):
    trace = read_trace(write_turns(tmp_path / "t.jsonl", conversations=3, turns=4))
    for arrival in trace:
        assert len(arrival.blocks) == arrival.prompt_tokens // 512
        assert arrival.blocks[0] == 0
        assert max(arrival.blocks) < 10**9
        assert arrival.session == str(arrival.blocks[1])
    assert len({arrival.session for arrival in trace}) == 3
    assert all(
        a.blocks == () and a.session == ""
        for a in read_trace(write_mooncake(tmp_path / "plain.jsonl", lengths(20)))
    )


def test_the_second_time_around_the_conversations_are_others(tmp_path):
    trace = read_trace(write_turns(tmp_path / "t.jsonl", conversations=3, turns=4))
    window = replayed(trace, 1.0, 30.0, seed=1)
    laps: dict[tuple[int, ...], list[float]] = {}
    for arrival in window:
        laps.setdefault(arrival.blocks, []).append(arrival.at_s)
    assert len(window) > 2 * len(trace)
    assert all(len(times) == 1 for times in laps.values())
    for turn in window:
        for other in window:
            shared = sum(a == b for a, b in zip(turn.blocks, other.blocks, strict=False))
            assert (shared > 1) == (turn.session == other.session)


def _event_log(path: Path, *arrived: tuple[float, RequestArrived]) -> Path:
    writer = EventLogWriter(path, SchedulerConfig())
    for now_s, event in arrived:
        writer.write(now_s, event, [])
    writer.close()
    return path


def test_an_event_log_is_a_trace_of_its_arrivals_without_retries(tmp_path):
    path = _event_log(
        tmp_path / "router.log",
        (7.0, RequestArrived(rid="a", prompt_tokens=500, max_new_tokens=30, session="s")),
        (7.5, RequestArrived(rid="a.1", prompt_tokens=500, exclude=("p0",))),
        (8.5, RequestArrived(rid="b", prompt_tokens=0, tenant="t", priority=2)),
    )
    first, second = read_trace(path)
    assert first == Arrival(0.0, 500, 30, session="s")
    assert second == Arrival(1.5, 1, 200, priority=2, tenant="t")


def test_an_event_log_that_is_garbage_or_empty_is_refused(tmp_path):
    garbage = tmp_path / "garbage.events"
    garbage.write_bytes(MAGIC + (3).to_bytes(4, "big") + b"abc")
    long = RequestArrived(rid="a", prompt_tokens=1 << 40)
    for path, said in (
        (garbage, "garbage.events"),
        (_event_log(tmp_path / "empty.events"), "no requests in it"),
        (_event_log(tmp_path / "long.events", (1.0, long)), "prompt_tokens must be between"),
        (_event_log(tmp_path / "nan.events", (float("nan"), long)), "finite|between"),
    ):
        with pytest.raises(TraceError, match=said):
            read_trace(path)


def test_the_converter_of_the_documentation_makes_a_trace(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    log = [
        {"time": "2026-11-26T10:00:00.250Z", "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
        {"time": 1795687201.5, "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
        {"time": "2026-11-26T10:00:09Z", "usage": None},
    ]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        input="\n".join([*map(json.dumps, log), "GET /health 200"]),
        capture_output=True,
        text=True,
        check=True,
    )
    path = tmp_path / "requests.jsonl"
    path.write_text(done.stdout)
    found = [
        (arrival.at_s, arrival.prompt_tokens, arrival.output_tokens) for arrival in read_trace(path)
    ]
    assert found == [(0.0, 9, 2), (pytest.approx(1.25), 7, 3)]
    assert done.stderr.count("left out:") == 2
