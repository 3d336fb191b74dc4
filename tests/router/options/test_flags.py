"""The command line: both spellings, stock defaults, and errors that say what to write."""

from __future__ import annotations

import os
from collections import Counter
from operator import attrgetter
from pathlib import Path

import pytest

from sglang_sbs import launch_scheduler
from sglang_sbs.launch_router import main
from sglang_sbs.router.options.arguments import FlagError, build_parser
from sglang_sbs.router.options.config import default_bodies_bytes
from sglang_sbs.router.options.option import Option, switch
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.stock import IGNORED_OPTIONS, NEAREST_POLICY
from sglang_sbs.router.options.table import GROUPS
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.policy_registry import policy_names

PD = ["--pd-disaggregation", "--prefill", "http://p0:30000", "8998", "--decode", "http://d0:30000"]
QUIET = ["--sbs-endforward-bind", "tcp://127.0.0.1:7600"]

STOCK_DEFAULTS = {
    "host": "0.0.0.0",
    "port": 30000,
    "prometheus_host": "0.0.0.0",
    "prometheus_port": 29000,
    "worker_startup_timeout_secs": 1800,
    "worker_startup_check_interval": 30,
    "request_timeout_secs": 1800,
    "shutdown_grace_period_secs": 180,
    "max_concurrent_requests": -1,
    "queue_size": 100,
    "queue_timeout_secs": 60,
    "retry_max_retries": 5,
    "retry_initial_backoff_ms": 50,
    "retry_max_backoff_ms": 30_000,
    "retry_backoff_multiplier": 1.5,
    "retry_jitter_factor": 0.2,
    "disable_retries": False,
    "health_failure_threshold": 3,
    "health_success_threshold": 2,
    "health_check_timeout_secs": 5,
    "health_check_interval_secs": 60,
    "disable_health_check": False,
    "cb_failure_threshold": 10,
    "cb_success_threshold": 3,
    "cb_timeout_duration_secs": 60,
    "disable_circuit_breaker": False,
}
"""Defaults of sglang_router 0.3.2 (``RouterArgs``), for the flags honoured here."""

STOCK_FLAGS = """
    host port worker-urls policy prefill-policy decode-policy cache-threshold
    balance-abs-threshold balance-rel-threshold bucket-adjust-interval-secs
    eviction-interval-secs max-tree-size max-idle-secs assignment-mode max-payload-size
    dp-aware enable-igw mini-lb pd-disaggregation prefill decode worker-startup-timeout-secs
    worker-startup-check-interval service-discovery selector service-discovery-port
    service-discovery-namespace prefill-selector decode-selector log-dir log-level
    prometheus-port prometheus-host prometheus-duration-buckets request-id-headers
    request-timeout-secs shutdown-grace-period-secs cors-allowed-origins
    max-concurrent-requests queue-size queue-timeout-secs rate-limit-tokens-per-second
    retry-max-retries retry-initial-backoff-ms retry-max-backoff-ms retry-backoff-multiplier
    retry-jitter-factor disable-retries cb-failure-threshold cb-success-threshold
    cb-timeout-duration-secs cb-window-duration-secs disable-circuit-breaker
    health-failure-threshold health-success-threshold health-check-timeout-secs
    health-check-interval-secs health-check-endpoint disable-health-check model-path
    tokenizer-path chat-template tokenizer-cache-enable-l0 tokenizer-cache-l0-max-entries
    tokenizer-cache-enable-l1 tokenizer-cache-l1-max-memory reasoning-parser tool-call-parser
    mcp-config-path backend history-backend oracle-wallet-path oracle-tns-alias
    oracle-connect-descriptor oracle-username oracle-password oracle-pool-min oracle-pool-max
    oracle-pool-timeout-secs postgres-db-url postgres-pool-max redis-url redis-pool-max
    redis-retention-days client-cert-path client-key-path ca-cert-paths tls-cert-path
    tls-key-path enable-trace otlp-traces-endpoint api-key control-plane-api-keys
    control-plane-audit-enabled jwt-issuer jwt-audience jwt-jwks-uri jwt-role-mapping
"""
"""Every flag of ``sglang_router.launch_router`` 0.3.2."""


def test_the_command_of_the_readme() -> None:
    options = parse_flags([*PD, "--prefill", "http://p1:30000", "none", "--policy", "sbs"])
    assert options.prefill == (("http://p0:30000", 8998), ("http://p1:30000", None))
    assert options.decode == ("http://d0:30000",)
    assert options.scheduler.policy == "sbs"
    (warning,) = options.warnings
    assert "--sbs-endforward-bind tcp://0.0.0.0:7600" in warning


def test_defaults_are_those_of_the_stock_router() -> None:
    args = vars(build_parser().parse_args([]))
    assert {name: args[name] for name in STOCK_DEFAULTS} == STOCK_DEFAULTS


def test_what_a_flag_says_is_in_each_of_its_fields() -> None:
    """A row of the table that is not used, or used twice, would be a flag without effect."""
    rows = [option for options in GROUPS.values() for option in options]
    paths = Counter(path for option in rows for path in option.fields.split())
    assert [path for path, times in paths.items() if times > 1] == []
    switches = [option for option in rows if option.type is switch and option.fields]
    flags = [f"--{option.flag}" for option in switches]
    without, given = parse_flags(PD), parse_flags([*PD, *flags])
    for option in switches:
        field = attrgetter(option.fields)
        assert isinstance(field(given), bool), option.flag
        assert field(given) is not field(without), option.flag


def test_bodies_are_smaller_than_the_stock_router_lets_them_be() -> None:
    assert parse_flags(PD).relay.max_payload_bytes == 32 << 20
    options = parse_flags([*PD, "--max-payload-size", "1000", "--sbs-max-bodies-size", "5000"])
    assert options.relay.max_payload_bytes == options.max_payload_bytes == 1000
    assert options.relay.max_bodies_bytes == 5000


@pytest.mark.parametrize(
    ("limit", "bodies"),
    [(f"{8 << 30}\n", 2 << 30), (f"{1 << 30}\n", 512 << 20), ("max\n", None), (None, None)],
)
def test_all_bodies_may_take_a_quarter_of_the_memory(
    tmp_path: Path, limit: str | None, bodies: int | None
) -> None:
    path = tmp_path / "memory.max"
    if limit is not None:
        path.write_text(limit)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine_share = max(512 << 20, machine // 4)
    assert default_bodies_bytes([path]) == min(machine_share, bodies or machine_share)
    assert parse_flags(PD).relay.max_bodies_bytes == default_bodies_bytes()


def test_every_stock_flag_is_known_in_both_spellings() -> None:
    known = {name for action in build_parser()._actions for name in action.option_strings}
    missing = {f"--{flag}" for flag in STOCK_FLAGS.split()} - known
    assert missing == {"--worker-urls"}
    assert {f"--router-{flag}" for flag in STOCK_FLAGS.split()} - known == {"--router-worker-urls"}


def test_both_spellings_mean_the_same() -> None:
    plain = parse_flags([*PD, "--policy", "round_robin", "--port", "1234", "--queue-size", "7"])
    prefixed = parse_flags(
        [
            *("--router-pd-disaggregation", "--router-prefill", "http://p0:30000", "8998"),
            *("--router-decode", "http://d0:30000", "--router-policy", "round_robin"),
            *("--router-port", "1234", "--router-queue-size=7"),
        ]
    )
    assert plain == prefixed
    assert (plain.port, plain.queue_size) == (1234, 7)


@pytest.mark.parametrize("option", IGNORED_OPTIONS, ids=lambda option: option.flag)
def test_flags_without_meaning_are_accepted_with_one_warning(option: Option) -> None:
    value = [] if option.type is switch else ["5"]
    values = value if option.nargs is None else ["a=b", "c=d"]
    options = parse_flags([f"--{option.flag}", *values, *PD, *QUIET])
    (warning,) = options.warnings
    assert f"--{option.flag} has no effect" in warning


@pytest.mark.parametrize(
    ("stock", "nearest"),
    [
        ("cache_aware", "sbs"),
        ("manual", "session"),
        ("bucket", "least_tokens"),
        *((name, name) for name in policy_names() if name not in NEAREST_POLICY),
    ],
)
def test_stock_policies_map_to_the_nearest(stock: str, nearest: str) -> None:
    options = parse_flags([*PD, *QUIET, "--policy", stock])
    assert options.scheduler.policy == nearest
    assert len(options.warnings) == (stock != nearest)
    assert all(f"the nearest, {nearest}: " in warning for warning in options.warnings)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--polcy", "sbs"], ["--polcy", "did you mean --policy"]),
        (["--zzz"], ["unknown flag --zzz", "--help"]),
        (["--policy", "sbz"], ["sbz", "did you mean sbs"]),
        (["--worker-urls", "http://x"], ["--worker-urls", "--prefill"]),
        (["--prefill", "ftp://x"], ["--prefill", "http://"]),
        (["--prefill", "http://x:1", "99999999"], ["bootstrap port", "1..65535"]),
        (["--prefill", "http://x:1", "8998", "http://y:1"], ["repeat the flag"]),
        (["--prefill", "http://x:1/v1"], ["path"]),
        (["--decode", "http://d0:30000"], ["listed twice"]),
        (["--port", "70000"], ["--port", "0..65535"]),
        (["--retry-jitter-factor", "2"], ["--retry-jitter-factor", "0 to 1"]),
        (["--request-timeout-secs", "0"], ["greater than 0"]),
        (["--sbs-trigger", "magic"], ["--sbs-trigger", "adaptive"]),
        (["--sbs-endforward-bind", "7600"], ["tcp://0.0.0.0:7600"]),
        (["--tls-cert-path", "x.pem"], ["--tls-key-path"]),
        (["--health-check-endpoint", "health"], ["must start with /"]),
        (["--pol", "sbs"], ["--pol"]),
    ],
)
def test_bad_command_lines_say_what_to_write(argv: list[str], words: list[str]) -> None:
    with pytest.raises(FlagError) as error:
        parse_flags([*PD, *argv])
    for word in words:
        assert word in str(error.value)


def test_own_flags_reach_the_scheduler() -> None:
    options = parse_flags(
        [
            *PD,
            *("--sbs-trigger", "paper", "--sbs-decode", "iqr", "--sbs-n-limit", "3"),
            *("--sbs-queue-timeout-secs", "5", "--sbs-t-default-ms", "100"),
            *("--sbs-max-hold-ms", "250", "--sbs-endforward-bind", "none"),
            *("--sbs-iqr-k", "2.5", "--sbs-max-queue-tokens", "70000"),
        ]
    )
    config = options.scheduler
    assert (config.trigger, config.decode_rule, config.n_limit) == ("paper", "iqr", 3)
    assert (config.default_timeout_s, config.t_default_s, config.max_hold_s) == (5, 0.1, 0.25)
    assert (config.iqr_k, config.max_queue_tokens) == (2.5, 70_000)
    assert options.endforward_bind is None


def test_without_flags_the_scheduler_has_its_own_defaults() -> None:
    assert parse_flags(PD).scheduler == SchedulerConfig()


@pytest.mark.parametrize(
    ("bind", "warned"),
    [
        ("tcp://0.0.0.0:7600", True),
        ("tcp://*:7600", True),
        ("tcp://[::]:7600", True),
        ("tcp://10.0.0.1:7600", True),
        ("tcp://127.0.0.1:7600", False),
        ("tcp://[::1]:7600", False),
        ("ipc:///tmp/sbs", False),
        ("none", False),
    ],
)
def test_an_endforward_socket_others_can_reach_is_warned_about(bind: str, warned: bool) -> None:
    options = parse_flags([*PD, "--sbs-endforward-bind", bind])
    assert any("without authentication" in text for text in options.warnings) == warned


def test_a_front_end_hears_no_endforward_and_warns_of_none() -> None:
    assert not parse_flags(["--sbs-scheduler", "tcp://127.0.0.1:7700"]).warnings


def test_urls_get_one_spelling() -> None:
    options = parse_flags(
        ["--prefill", "P0:30000/", "--decode", "https://D0", "--decode", "[::1]:5"]
    )
    assert options.prefill[0][0] == "http://p0:30000"
    assert options.decode == ("https://d0:443", "http://[::1]:5")


def test_main_without_workers_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--policy", "sbs"]) == 2
    assert "--prefill URL" in capsys.readouterr().err


def test_an_error_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_scheduler.main([]) == 2
    assert capsys.readouterr().err.startswith("sglang-sbs scheduler: a scheduler needs --sbs-lis")


def test_help_teaches_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for policy in policy_names():
        assert policy in text
    assert "python -m sglang_sbs.launch_router --pd-disaggregation" in text
    assert "--router-policy" in text
    assert "--oracle" not in text
