"""``sglang-sbs evaluate`` on logs of a cluster whose cost is known."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import msgspec
import pytest
from evaluate_rig import SPEC, arrivals, ran

from sglang_sbs.cli import main as sglang_sbs
from sglang_sbs.evaluate import cli
from sglang_sbs.evaluate.fitting.recording import read_recording
from sglang_sbs.evaluate.replayed import RAN, run
from sglang_sbs.evaluate.verdict import Evaluation
from sglang_sbs.evaluate.workload import workload_of
from sglang_sbs.scheduling import (
    Dispatch,
    InstanceDown,
    InstanceUp,
    PolicySwitched,
    PrefillDone,
    RequestArrived,
    RequestEnded,
    SchedulerConfig,
)
from sglang_sbs.scheduling.eventlog import EventLogWriter, LogRecord, read_event_log
from sglang_sbs.simulator.cluster.spec import TopologyChange


def evaluate(log: Path, *flags: str) -> tuple[int, dict]:
    out = log.with_suffix(".json")
    words = ["evaluate", str(log), "--workers", "1", "--json", str(out), *flags]
    return sglang_sbs(words), json.loads(out.read_text())


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def test_intervals_do_not_depend_on_which_simulation_ends_first(round_robin):
    work = workload_of(read_recording(round_robin(1).log))
    rows = [run(work, policy, draw) for policy in (RAN, "sbs") for draw in range(3)]
    found = []
    for order in (rows, rows[::-1], rows[1:] + rows[:1]):
        evaluation = Evaluation(work)
        for row in order:
            evaluation.add(row)
        found.append(evaluation.policies)
    assert found[0]["sbs"].mean.low < found[0]["sbs"].mean.high
    assert found == [found[0]] * 3


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_evaluate_predicts_the_same_arrivals_under_another_policy(round_robin, seed, capsys):
    recording = round_robin(seed)
    code, found = evaluate(recording.log, "--policies", "sbs")
    assert code == 0
    assert found["calibration"]["mean"] == pytest.approx(1, abs=0.03)
    assert found["calibration"]["p99"] == pytest.approx(1, abs=0.1)

    # The truth is another run of the very cluster, which the evaluation knows only from its log.
    counted = range(len(recording.sent) - found["requests"], len(recording.sent))
    real = ran("sbs", recording.sent, msgspec.structs.replace(SPEC, seed=200 + seed))
    sbs_s = [real.requests[i].ttft_s for i in counted]
    was_s = [recording.outcome.requests[i].ttft_s for i in counted]
    sbs, ratio = found["policies"]["sbs"], statistics.fmean(sbs_s) / statistics.fmean(was_s)
    assert sbs["mean_ratio"] == pytest.approx(ratio, rel=0.04)
    assert sbs["low"] <= ratio <= sbs["high"]
    assert sbs["high"] - sbs["low"] < 0.4, "an interval that says nothing"
    assert sbs["p99_low"] <= p99(sbs_s) / p99(was_s) <= sbs["p99_high"]
    first = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(
        r"On these \d+ seconds \(\d+ requests, load 0\.\d\d\) sbs would have had 0\.\d\dx "
        r"\(0\.\d\d to 0\.\d\d\) the mean TTFT of the recorded run; the model reproduces this run "
        r"to \d+% in the mean and \d+% in the p99\.",
        first,
    )


def test_a_policy_that_ran_gets_a_ratio_of_one(round_robin):
    _, found = evaluate(round_robin(1).log, "--policies", "round_robin")
    assert found["policies"]["round_robin"]["mean_ratio"] == pytest.approx(1, abs=0.03)


def test_replayed_requests_leave_at_their_recorded_times_and_places(round_robin):
    recording = round_robin(1)
    work = workload_of(read_recording(recording.log))
    sent = [(r.prefill, r.decode[1], r.dispatched_s) for r in recording.outcome.requests]
    start_s = recording.sent[0].at_s
    for placement, (prefill, decode_rank, at_s) in zip(work.placements, sent, strict=True):
        assert (placement.instance, placement.rank) == prefill
        assert placement.decode_rank == decode_rank
        assert placement.at_s == pytest.approx(at_s - start_s, abs=1e-9)
    assert run(work, RAN, 0)["unfinished"] == 0


@pytest.mark.parametrize(
    ("tamper", "cause"),
    [
        (
            lambda report: msgspec.structs.replace(report, forward_s=report.forward_s / 2),
            "passes take 2.0",
        ),
        (
            lambda report: msgspec.structs.replace(
                report, forward_s=report.forward_s * (0.3 if report.end_s < 25 else 1.0)
            ),
            "the hardware or the engines changed during the log",
        ),
        (
            lambda report: msgspec.structs.replace(
                report, forward_s=report.forward_s * (0.4 + report.forward_id % 7 / 5)
            ),
            "pass times do not follow tokens and requests",
        ),
    ],
    ids=["half of the time", "a third of it at first", "something else than tokens"],
)
def test_passes_that_contradict_the_model_give_no_ratio(tmp_path, capsys, tamper, cause):
    log = tmp_path / "wrong.events"
    ran("round_robin", arrivals(1), SPEC, log, tamper)
    code, found = evaluate(log)
    assert code == 1
    assert found["policies"] == {}
    out = capsys.readouterr().out
    assert "so there is no ratio" in out.splitlines()[0]
    assert cause in out
    assert "would have had" not in out


def test_the_page_refers_to_no_other_file(round_robin, tmp_path):
    page = tmp_path / "page.html"
    evaluate(round_robin(1).log, "--policies", "sbs", "--html", str(page))
    text = page.read_text()
    assert "sbs would have had 0." in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert text.count("data:image/png") == 2


def test_a_log_under_sbs_is_a_workload_too(tmp_path):
    log = tmp_path / "sbs.events"
    sent = arrivals(4)
    outcome = ran("sbs", sent, SPEC, log)
    code, found = evaluate(log, "--policies", "round_robin")
    assert code == 0
    assert found["ran"] == ["sbs"]
    counted = range(len(sent) - found["requests"], len(sent))
    # One run of so few requests differs from the next by several per cent.
    specs = [msgspec.structs.replace(SPEC, seed=seed) for seed in (9, 10, 11)]
    real = [ran("round_robin", sent, spec) for spec in specs]
    ratio = statistics.fmean(outcome.requests[i].ttft_s for outcome in real for i in counted) / (
        statistics.fmean(outcome.requests[i].ttft_s for i in counted)
    )
    assert found["policies"]["round_robin"]["mean_ratio"] == pytest.approx(ratio, rel=0.08)
    assert found["policies"]["round_robin"]["mean_ratio"] > 1.2


def test_an_instance_that_leaves_and_comes_back_is_away_in_the_model_too(tmp_path):
    log = tmp_path / "drain.events"
    changes = TopologyChange(15.0, "drain", "p1"), TopologyChange(30.0, "up", "p1")
    ran("round_robin", arrivals(5, qps=10), msgspec.structs.replace(SPEC, changes=changes), log)
    code, found = evaluate(log, "--policies", "eta")
    assert code == 0
    assert found["calibration"]["mean"] == pytest.approx(1, abs=0.05)
    assert "Note: prefill instances came or went 2 times." in found["notes"]


def test_a_pod_that_replaces_another_adds_no_capacity_to_the_load(round_robin, tmp_path):
    """A Kubernetes pod or an unnamed engine has a new name after a restart."""
    log = tmp_path / "rolled.events"
    records = list(read_event_log(round_robin(1).log))
    ups = {r.event.instance: r.event for r in records if isinstance(r.event, InstanceUp)}
    middle_s = records[len(records) // 2].now_s

    def renamed(thing, at_s: float):
        field = "prefill" if isinstance(thing, Dispatch) else "instance"
        old = getattr(thing, field, "")
        return (
            thing
            if at_s < middle_s or old not in ups or ups[old].role != "prefill"
            else msgspec.structs.replace(thing, **{field: f"{old} anew"})
        )

    writer, rolled = EventLogWriter(log, records[0].config), False
    for record in records[1:]:
        if record.now_s >= middle_s and not rolled:
            rolled = True
            for up in (up for up in ups.values() if up.role == "prefill"):
                writer.write(middle_s, InstanceDown(instance=up.instance), [])
                writer.write(middle_s, renamed(up, middle_s), [])
        commands = [renamed(command, record.now_s) for command in record.commands]
        writer.write(record.now_s, renamed(record.event, record.now_s), commands)
    writer.close()
    loads = [workload_of(read_recording(path)).load for path in (round_robin(1).log, log)]
    assert loads[1] == pytest.approx(loads[0], rel=0.03)


def test_a_change_of_policy_is_noted(round_robin, tmp_path):
    log = tmp_path / "mixed.events"
    records = list(read_event_log(round_robin(1).log))
    writer = EventLogWriter(log, records[0].config)
    for record in records[1:]:
        writer.write(record.now_s, record.event, record.commands)
        if record is records[len(records) // 2]:
            writer.write(record.now_s, PolicySwitched(policy="eta"), [])
    writer.close()
    _, found = evaluate(log, "--policies", "sbs")
    assert found["ran"] == ["round_robin", "eta"]
    assert "the router changed its policy: round_robin, eta" in found["notes"][0]


def test_an_observed_log_counts_until_the_end_of_the_prompt(round_robin, tmp_path):
    log = tmp_path / "observed.events"
    recording = round_robin(2)
    records = list(read_event_log(recording.log))
    # An observer learns of each instance from its first report, here after the first request.
    ups = [record for record in records[1:] if isinstance(record.event, InstanceUp)]
    others = [record for record in records[1:] if record not in ups]
    first = next(i for i, entry in enumerate(others) if isinstance(entry.event, RequestArrived))
    received_s = others[first].now_s + 1e-6
    ups = [LogRecord(received_s, record.event, record.commands) for record in ups]
    writer = EventLogWriter(log, SchedulerConfig(), observed=True)
    for record in [*others[: first + 1], *ups, *others[first + 1 :]]:
        if not isinstance(record.event, RequestEnded | PrefillDone):
            commands = [
                msgspec.structs.replace(command, decode="", decode_rank=-1)
                for command in record.commands
                if isinstance(command, Dispatch)
            ]
            writer.write(record.now_s, record.event, commands)
    writer.close()
    code, found = evaluate(log, "--policies", "sbs")
    assert code == 0
    assert found["measured_until"] == "end of the prompt"
    assert found["ran"] == ["another router"]
    assert found["calibration"]["mean"] == pytest.approx(1, abs=0.03)
    ends_s = [
        r.ttft_s - SPEC.first_token_s for r in recording.outcome.requests[-found["requests"] :]
    ]
    late_s = SPEC.feedback_latency_s  # the fastest message is taken as instant
    assert found["measured_mean_s"] == pytest.approx(statistics.fmean(ends_s) + late_s, rel=1e-3)
    assert any("TTFT is counted until the end of the prompt" in note for note in found["notes"])
    assert not any("came or went" in note for note in found["notes"])


def test_requests_of_others_in_the_passes_are_noted(round_robin, tmp_path):
    log = tmp_path / "foreign.events"
    records = list(read_event_log(round_robin(1).log))
    writer = EventLogWriter(log, records[0].config)
    for record in records[1:]:
        if not (isinstance(record.event, RequestArrived) and record.event.rid.endswith("7")):
            writer.write(record.now_s, record.event, record.commands)
    writer.close()
    _, found = evaluate(log, "--policies", "sbs")
    assert any("other traffic reaches these engines" in note for note in found["notes"])


def test_what_cannot_be_evaluated_is_refused(round_robin, tmp_path, capsys):
    records = list(read_event_log(round_robin(1).log))

    def log_of(name: str, some: list[LogRecord]) -> Path:
        path = tmp_path / name
        writer = EventLogWriter(path, records[0].config)
        for record in some:
            writer.write(record.now_s, record.event, record.commands)
        writer.close()
        return path

    (tmp_path / "text").write_text("hello")
    silent = [r for r in records[1:] if type(r.event).__name__ != "ForwardEnded"]
    few = [r for r in records[1:] if r.now_s < 3]
    for path, message in [
        (tmp_path / "absent", "No such file"),
        (tmp_path / "text", "is not an sglang-sbs event log"),
        (log_of("empty", []), "has no EndForward message of a prefill engine"),
        (log_of("silent", silent), "has no EndForward message of a prefill engine"),
        (log_of("few", few), "requests that were sent; 100 are needed"),
    ]:
        assert sglang_sbs(["evaluate", str(path)]) == 2
        error = capsys.readouterr().err
        assert message in error, path
        assert str(path) in error
    for flags in (["--policies", "sbs,best"], ["--json", str(tmp_path / "text" / "x.json")]):
        with pytest.raises(SystemExit) as exit_:
            sglang_sbs(["evaluate", str(round_robin(1).log), *flags])
        assert exit_.value.code == 2


def test_a_log_with_too_few_passes_for_an_interval_says_how_long_it_must_be(tmp_path, capsys):
    log = tmp_path / "short.events"
    ran("round_robin", arrivals(1, qps=30, requests=300), SPEC, log)
    assert sglang_sbs(["evaluate", str(log)]) == 2
    assert re.search(
        r"spans 9 s; with passes of 0\.\d\d s at least \d\d s are needed", capsys.readouterr().err
    )


def test_an_interrupt_gives_what_there_is(round_robin, monkeypatch, capsys):
    simulated = []

    def interrupted(work, policy, draw):
        if policy == "round_robin":
            raise KeyboardInterrupt
        simulated.append(policy)
        return run(work, policy, draw)

    monkeypatch.setattr(cli, "run", interrupted)
    code, found = evaluate(round_robin(1).log, "--policies", "sbs,round_robin", "--draws", "1")
    assert code == 130
    assert simulated == [RAN, "sbs"]
    assert list(found["policies"]) == ["sbs"]
    captured = capsys.readouterr()
    assert captured.out.startswith("On these ")
    assert "interrupted; this is what there is so far" in captured.err


def test_an_interrupt_before_the_calibration_gives_no_answer(round_robin, monkeypatch, capsys):
    monkeypatch.setattr(cli, "run_all", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    code, found = evaluate(round_robin(1).log)
    assert code == 130
    assert found["calibration"] is None
    assert found["policies"] == {}
    assert "so there is no answer" in capsys.readouterr().out


def test_lines_tell_how_far_it_is_where_there_is_no_terminal(round_robin, capsys):
    evaluate(round_robin(1).log, "--policies", "sbs", "--draws", "1")
    progress = capsys.readouterr().err
    first, second = r"simulated the recorded run: 1 of 2, about \d+ s left", "simulated sbs: 2 of 2"
    assert re.search(f"{first}\n{second}\n", progress)


def test_cached_prompts_are_found_in_the_simulated_caches(tmp_path):
    spec = msgspec.structs.replace(SPEC, block_tokens=64, chunk_tokens=2048)
    sent = []
    for index, arrival in enumerate(arrivals(6, qps=10)):
        own = range(10_000 + 100 * index, 10_000 + 100 * index + arrival.prompt_tokens // 64)
        shared = range(100 * (index % 5), 100 * (index % 5) + 8)
        tokens = 512 + arrival.prompt_tokens
        sent.append(arrival._replace(prompt_tokens=tokens, blocks=(*shared, *own)))
    log = tmp_path / "cached.events"
    ran("sbs", sent, spec, log)
    code, found = evaluate(log, "--policies", "sbs,round_robin")
    assert code == 0
    assert found["calibration"]["mean"] == pytest.approx(1, abs=0.06)
    assert not math.isnan(found["policies"]["round_robin"]["mean_ratio"])
