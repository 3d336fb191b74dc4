"""The command: flags, exit codes, the two forms of the report, time limits."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import orjson
import pytest
from doctor_rig import Rig, rig
from rich.console import Console

from sglang_sbs.doctor import cli
from sglang_sbs.doctor.cli import main
from sglang_sbs.doctor.examine import CATALOGUE, gather, judge
from sglang_sbs.doctor.findings import GROUPS, Finding, Severity, Verdict, verdict
from sglang_sbs.doctor.options import parse_options
from sglang_sbs.doctor.report import as_json, exit_code, print_report
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.server import RouterServer
from sglang_sbs.router.workers.server_info import UnusableWorker, parse_server_info
from tools.reference.findings import meanings

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"

TWO = ["--prefill", "http://p0:30000", "8998", "--decode", "http://d0:30000"]


def of(severity: Severity) -> Finding:
    """Any finding of a severity."""
    name = next(name for name, entry in CATALOGUE.items() if entry.severity is severity)
    return Finding(name, severity, "http://p0:30000", "seen", CATALOGUE[name].change)


# The command line -----------------------------------------------------------------------------


def test_the_doctor_takes_a_routers_whole_command_line() -> None:
    options = parse_options(
        [*TWO, "--policy", "sbs", "--sbs-trigger=paper", "--router-api-key", "k", "--port", "1"]
    )
    assert options.router_flags.prefill == (("http://p0:30000", 8998),)
    assert options.router_flags.api_key == "k"
    assert options.given_bind is None
    assert parse_options([*TWO, "--sbs-endforward-bind=tcp://*:1"]).given_bind == "tcp://*:1"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--prefill URL"),
        (["--prefill", "http://p0:30000"], "--decode"),
        ([*TWO, "--decode", "tcp://d1:1"], "http://"),
        ([*TWO, "--router", "ftp://r"], "--router"),
        ([*TWO, "--timeout", "soon"], "--timeout"),
        ([*TWO, "--wait", "0"], "--wait"),
        ([*TWO, "--prob"], "did you mean"),
        ([*TWO, "--prefill", "http://p0:30000"], "listed twice"),
        ([*TWO, "--sbs-endforward-key-file", "/nonexistent/key"], "--sbs-endforward-key-file"),
    ],
)
def test_an_unusable_command_line_says_what_to_write(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_certificates_that_cannot_be_read_are_a_bad_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*TWO, "--ca-cert-paths", "/nonexistent/ca.pem"]) == 2
    said = capsys.readouterr().err
    assert "--ca-cert-paths /nonexistent/ca.pem: No such file" in said
    assert "Traceback" not in said


# Verdict and exit code ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("severities", "expected", "lenient", "strict"),
    [
        ([Severity.OK, Severity.NOTE], Verdict.HEALTHY, 0, 0),
        ([Severity.OK, Severity.WARNING], Verdict.WARNINGS, 0, 1),
        ([Severity.WARNING, Severity.ERROR], Verdict.BROKEN, 1, 1),
        ([], Verdict.HEALTHY, 0, 0),
    ],
)
def test_the_worst_finding_decides(
    severities: list[Severity], expected: Verdict, lenient: int, strict: int
) -> None:
    findings = [of(severity) for severity in severities]
    assert verdict(findings) == expected
    assert exit_code(findings, strict=False) == lenient
    assert exit_code(findings, strict=True) == strict


# Reports --------------------------------------------------------------------------------------


async def report_of(r: Rig) -> tuple[dict[str, object], list[Finding], str]:
    facts = await r.facts()
    options = facts.options
    findings = judge(facts)
    console = Console(file=io.StringIO(), width=200)
    print_report(console, facts, findings, quiet=options.quiet)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return orjson.loads(orjson.dumps(as_json(facts, findings))), findings, text


async def test_no_secret_of_an_engine_is_in_a_report() -> None:
    """Whatever the engine's /server_info shows, under the names that findings quote."""
    planted = "pl4nted"
    async with rig() as r:
        quoted = ("schedule_policy", "kv_cache_dtype", "elastic_ep_backend", "load_balance_method")
        more = ("disaggregation_transfer_backend", "disaggregation_decode_allocation_policy")
        r.decode.info |= dict.fromkeys((*quoted, *more), f"x --api-key '{planted} b'")
        r.prefill[0].info |= dict.fromkeys((*quoted, *more), f"token={planted}")
        for engine in r.engines:
            engine.info |= {"api_key": planted, "admin_api_key": planted}
            engine.info["served_model_name"] = f"s3://user:{planted}@store/{engine.port}"
            engine.sbs["sglang_sbs_version"] = f"1 token={planted}"
            engine.sbs["sgl_kernel_version"] = f"password: {planted}{engine.port}"
        r.prefill[1].info["disaggregation_mode"] = f"token={planted}"
        r.bootstraps[0].answers = {"/route": (500, {"password": planted})}
        report, findings, text = await report_of(r)
        assert any(finding.id == "pair.model" for finding in findings), (
            "names are compared and quoted"
        )
        assert planted not in text + orjson.dumps(report).decode()
        r.urls[r.decode.url] = r.router.url
        r.router.answers = {"/server_info": (500, {"password": planted})}
        report, _, text = await report_of(r)
        assert "/server_info answers 500" in text
        assert planted not in text + orjson.dumps(report).decode()


async def test_json_has_every_finding_and_a_stable_schema() -> None:
    async with rig() as r:
        await r.decode.stop()
        report, findings, _text = await report_of(r)
    assert set(report) == {
        *("schema", "sglang_sbs_version", "verdict", "exit_code", "counts", "router"),
        *("engines", "findings"),
    }
    assert (report["schema"], report["verdict"], report["exit_code"]) == (1, "broken", 1)
    assert report["findings"] == [
        {
            "id": finding.id,
            "severity": finding.severity,
            "subject": finding.subject,
            "seen": finding.seen,
            "change": finding.change,
        }
        for finding in findings
    ]
    engines = report["engines"]
    assert isinstance(engines, list)
    assert [engine["usable"] for engine in engines] == [True, True, False]
    assert engines[0]["dp_size"] == 2


async def test_the_text_begins_with_the_verdict_and_is_grouped_by_engine() -> None:
    async with rig() as r:
        r.prefill[1].ready_status = 503
        _report, findings, text = await report_of(r)
        r.flags.append("--quiet")
        _report, _findings, quiet = await report_of(r)
    lines = text.rstrip().split("\n")
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles[0] == lines[0], "the verdict"
    assert [title.split("  ")[0] for title in titles[1:4]] == [
        f"prefill {r.prefill[0].url}",
        f"prefill {r.prefill[1].url}",
        f"decode {r.decode.url}",
    ]
    worst = next(finding for finding in findings if finding.severity is Severity.ERROR)
    start = f"Start with {worst.id} ({worst.subject}): {worst.seen} -> {worst.change}"
    assert re.fullmatch(rf"broken: 1 error, \d notes in 3 engines\. {re.escape(start)}", lines[0])
    assert quiet.startswith(lines[0])
    for finding in findings:
        assert finding.id in text
        assert (finding.id in quiet) == (finding.severity is not Severity.OK)


def test_the_command_on_engines_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_sbs.cli", "doctor"),
            *("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"),
            *("--json", str(path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert " in 2 engines. Start with reach.unreachable (http://127.0.0.1:1): " in done.stdout
    assert {finding["id"] for finding in json.loads(path.read_text())["findings"]} == {
        "reach.unreachable",
        "reach.no-pair",
    }


def test_a_report_that_cannot_be_written_is_reported_with_its_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--router", "http://127.0.0.1:1", "--json", "/dev/null/report"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "sglang-sbs doctor: --json /dev/null/report: Not a directory"


def test_ctrl_c_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "gather", Mock(side_effect=KeyboardInterrupt))
    assert main(["--router", "http://127.0.0.1:1"]) == 130
    assert "sglang-sbs doctor: interrupted" in capsys.readouterr().err


async def test_nothing_an_engine_answers_is_a_traceback() -> None:
    """Every field of /server_info (and of the plugin's block) with values of every wrong type."""
    nonsense = [None, -1, 0, 2**63, 1.5, "", "x", [], {}, [None], {"a": []}, True]
    async with rig() as r:
        facts = await r.facts()
    names = [*facts.engines[0].data, "kv_events", "launch_command", "tp_size", "attn_cp_size"]
    judged = 0
    for engine in (facts.engines[0], facts.engines[-1]):
        before, role = engine.data, engine.role
        blocks = [
            {"sbs": before["sbs"] | {name: value}} for name in before["sbs"] for value in nonsense
        ]
        for change in [*({name: value} for name in names for value in nonsense), *blocks]:
            engine.data = before | change
            try:
                engine.info = parse_server_info(engine.data, role)
            except UnusableWorker as error:
                engine.info, engine.unusable = None, error
            findings = judge(facts)
            assert orjson.dumps(as_json(facts, findings))
            judged += bool(findings)
        engine.data, engine.info = before, parse_server_info(before, role)
    assert judged > 500


async def test_an_engine_that_answers_nonsense_over_http_is_a_finding() -> None:
    async with rig() as r:
        r.flags += ["--wait", "0.1"]
        r.bootstraps[0].answers["/route"] = (200, ["not", "an", "object"])
        for body in (b"[]", b"null", b"\xff", b'{"version": 1}', b'{"version": "x"'):
            r.router.answers["/server_info"] = (200, body.decode("latin-1"))
            r.urls[r.decode.url] = r.router.url
            findings = await r.examine()
            assert "reach.not-sglang" in {finding.id for finding in findings}
        assert "bootstrap.not-one" in {finding.id for finding in findings}


# A real router --------------------------------------------------------------------------------


async def test_a_router_alone_names_the_engines_and_says_what_arrives() -> None:
    async with rig() as r:
        argv = ["--host", "127.0.0.1", "--port", "0", "--sbs-endforward-bind", r.endpoint]
        argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", "0"]
        argv += ["--api-key", "user", "--admin-api-key", "admin"]
        for engine, port in zip(r.prefill, r.bootstrap_ports, strict=True):
            argv += ["--prefill", engine.url, str(port)]
        server = RouterServer(parse_flags([*argv, "--decode", r.decode.url]))
        await server.start()
        try:
            url = f"http://127.0.0.1:{server.port}"
            keys = ["--api-key", "user", "--admin-api-key", "admin"]
            async with asyncio.timeout(20):
                while True:
                    facts = await gather(parse_options(["--router", url, *keys]))
                    findings = judge(facts)
                    reporting = [finding for finding in findings if finding.id == "endforward.ok"]
                    if verdict(findings) is not Verdict.BROKEN and len(reporting) == len(r.engines):
                        break
            assert [engine.url for engine in facts.engines] == [e.url for e in r.engines]
            for engine in r.engines:
                mine = {finding.id for finding in findings if finding.subject == engine.url}
                assert {"endforward.ok", "plugin.ok"} <= mine
            assert facts.received is None, "a router that answers has the port"
            found = judge(await gather(parse_options(["--router", url])))
            assert "router.key" in {finding.id for finding in found}
        finally:
            await server.stop(grace_s=0.0)


# Docs -----------------------------------------------------------------------------------------


def test_every_entry_says_what_it_means_and_what_to_do() -> None:
    for name, entry in CATALOGUE.items():
        assert name.partition(".")[0] in GROUPS, name
        assert meanings("reference/findings.md")[name].endswith("."), name
        assert bool(entry.change) == (entry.severity is not Severity.OK), name


def test_usage_errors_are_flag_errors() -> None:
    with pytest.raises(FlagError):
        parse_options(["--strict"])
