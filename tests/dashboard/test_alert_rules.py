"""The alert rules fire when they should, and not otherwise: asked of Prometheus' own promtool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "examples" / "prometheus" / "alerts.yml"
AT = "15m"
"""Samples are 15 s apart: the 60th."""

Series = Mapping[str, str]

HEALTHY = {
    'smg_worker_health{worker="p0",worker_type="prefill"}': "1x70",
    'smg_worker_health{worker="d0",worker_type="decode"}': "1x70",
    'smg_worker_pool_size{worker_type="prefill",model="m"}': "1x70",
    'smg_worker_pool_size{worker_type="decode",model="m"}': "1x70",
}


def histogram(name: str, seconds: float, labels: str = "") -> Series:
    """10 observations between two scrapes, each of that many seconds."""
    bounds = ("0.01", "0.05", "1", "2.5", "5", "+Inf")
    return {
        f'{name}_bucket{{{labels}le="{le}"}}': f"0+{10 * (float(le) >= seconds)}x70"
        for le in bounds
    }


def slo(met: int, missed: int) -> Series:
    return {
        'sbs_slo_total{result="met"}': f"0+{met}x70",
        'sbs_slo_total{result="missed"}': f"0+{missed}x70",
    }


def age(seconds: int, healthy: int) -> Series:
    return {
        'sbs_endforward_age_seconds{worker="p0",dp_rank="0"}': f"{seconds}x70",
        'smg_worker_health{worker="p0",worker_type="prefill"}': f"{healthy}x70",
    }


FIRES: list[tuple[str, Series]] = [
    (
        "SbsNoHealthyWorkers",
        HEALTHY | {'smg_worker_health{worker="d0",worker_type="decode"}': "1x20 0x50"},
    ),
    (  # the last decode pod goes, and its series with it
        "SbsNoHealthyWorkers",
        HEALTHY
        | {
            'smg_worker_health{worker="d0",worker_type="decode"}': "1x20 stale",
            'smg_worker_pool_size{worker_type="decode",model="m"}': "1x20 0x50",
        },
    ),
    ("SbsRouterGone", {"sbs_queue_requests": "0x20 stale"}),
    ("SbsSlowFirstToken", histogram("sbs_class_ttft_seconds", 2.4, 'class="normal",')),
    ("SbsSloMissed", slo(90, 10)),
    ("SbsEndForwardStale", age(6, healthy=1)),
    ("SbsWatchdogReset", {'sbs_watchdog_fires_total{worker="p0"}': "0x50 1x20"}),
    ("SbsFallbackTier", {'sbs_signal_tier{worker="p0",tier="http"}': "1x70"}),
    ("SbsThrottled", {"sbs_throttled": "1x70"}),
    ("SbsQueueNearLimit", {"sbs_queue_requests": "8001x70"}),
    ("SbsRefusals", {'sbs_refusals_total{cause="queue_full"}': "0+3x70"}),
    ("SbsOldestWait", {"sbs_oldest_wait_seconds": "11x70"}),
    ("SbsSchedulerErrors", {"sbs_scheduler_errors_total": "0x50 1x20"}),
    ("SbsFrontEndAlone", {"sbs_scheduler_losses_total": "0x50 1x20"}),
    ("SbsFrontEndAlone", {"sbs_front_ends_alone": "1x70"}),
    ("SbsBrokenStreams", {'sbs_broken_streams_total{code="upstream"}': "0+3x70"}),
    ("SbsPrefillStalled", {'sbs_worker_problem{worker="p0",problem="stalled"}': "1x70"}),
    ("SbsNotHolding", {"sbs_holding": "0x70"}),
    ("SbsWorkerProblem", {'sbs_worker_problem{worker="p0",problem="tokenizer"}': "1x70"}),
    ("SbsLedgerDrift", {'sbs_ledger_drift_requests{worker="p0"}': "-21x70"}),
    ("SbsSlowDecisions", histogram("sbs_decision_seconds", 0.04)),
    ("SbsLoopStalls", {"sbs_loop_stalls_total": "0x50 1+1x20"}),
]
QUIET: list[tuple[str, Series]] = [
    ("SbsNoHealthyWorkers", HEALTHY),
    (  # one of two
        "SbsNoHealthyWorkers",
        HEALTHY | {'smg_worker_health{worker="d1",worker_type="decode"}': "0x70"},
    ),
    ("SbsRouterGone", {"sbs_queue_requests": "0x70"}),
    ("SbsSlowFirstToken", histogram("sbs_class_ttft_seconds", 0.9, 'class="normal",')),
    ("SbsSlowFirstToken", histogram("sbs_class_ttft_seconds", 4.0, 'class="low",')),
    ("SbsSloMissed", slo(98, 2)),
    ("SbsSloMissed", slo(0, 0)),
    ("SbsEndForwardStale", age(1, healthy=1)),
    ("SbsEndForwardStale", age(60, healthy=0)),
    ("SbsWatchdogReset", {'sbs_watchdog_fires_total{worker="p0"}': "0x10 1x60"}),
    ("SbsFallbackTier", {'sbs_signal_tier{worker="p0",tier="endforward"}': "1x70"}),
    ("SbsThrottled", {"sbs_throttled": "0x70"}),
    ("SbsQueueNearLimit", {"sbs_queue_requests": "8000x70"}),
    ("SbsRefusals", {'sbs_refusals_total{cause="queue_full"}': "0+1x70"}),
    ("SbsOldestWait", {"sbs_oldest_wait_seconds": "9x70"}),
    ("SbsSchedulerErrors", {"sbs_scheduler_errors_total": "0x5 1x65"}),
    ("SbsFrontEndAlone", {"sbs_scheduler_losses_total": "1x70"}),
    ("SbsFrontEndAlone", {"sbs_front_ends_alone": "0x70"}),
    ("SbsBrokenStreams", {'sbs_broken_streams_total{code="upstream"}': "0+1x70"}),
    ("SbsPrefillStalled", {'sbs_worker_problem{worker="p0",problem="tokenizer"}': "1x70"}),
    ("SbsNotHolding", {"sbs_holding": "1x70"}),
    ("SbsWorkerProblem", {'sbs_worker_problem{worker="p0",problem="tokenizer"}': "1x20 stale"}),
    ("SbsLedgerDrift", {'sbs_ledger_drift_requests{worker="p0"}': "-20x70"}),
    ("SbsSlowDecisions", histogram("sbs_decision_seconds", 0.009)),
    ("SbsLoopStalls", {"sbs_loop_stalls_total": "0x50 1x20"}),
]


@pytest.fixture(scope="session")
def promtool() -> str:
    """Skips where there is none, unless scripts/install would have installed it."""
    where = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    path = shutil.which("promtool", path=where)
    if path is not None:
        return path
    text = "NO PROMTOOL, the alert rules are not tested: it comes with scripts/install on Debian"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        pytest.fail(text)
    pytest.skip(text)


def ask(promtool: str, folder: Path, cases: list[tuple[str, Series]], fires: int) -> str:
    """Return promtool's complaint about ``cases``: empty, if each alert fires ``fires`` times."""
    tests = [
        {
            "name": f"{alert}, case {number}",
            "interval": "15s",
            "input_series": [{"series": s, "values": values} for s, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertstate="firing",alertname="{alert}"}})'
                    " or vector(0)",
                    "eval_time": AT,
                    "exp_samples": [{"labels": "{}", "value": fires}],
                }
            ],
        }
        for number, (alert, series) in enumerate(cases)
    ]
    path = folder / "tests.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests})
    )
    done = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_prometheus_takes_the_rules(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", str(RULES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_for_its_reason(promtool: str, tmp_path: Path) -> None:
    assert ask(promtool, tmp_path, FIRES, fires=1) == ""


def test_no_alert_fires_without_its_reason(promtool: str, tmp_path: Path) -> None:
    assert ask(promtool, tmp_path, QUIET, fires=0) == ""


def test_every_alert_has_a_case_of_both_kinds() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert alerts == {alert for alert, _ in FIRES} == {alert for alert, _ in QUIET}


def test_a_wrong_expectation_would_be_noticed(promtool: str, tmp_path: Path) -> None:
    assert "SbsThrottled" in ask(promtool, tmp_path, [("SbsThrottled", {})], fires=1)
