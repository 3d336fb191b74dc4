"""Flags in a file and in the environment: the same flags, in a fixed order of precedence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sglang_sbs.engine import config as hook
from sglang_sbs.launch_router import main
from sglang_sbs.router.options.arguments import MOST_NEEDED, FlagError, build_parser
from sglang_sbs.router.options.option import switch
from sglang_sbs.router.options.options import parse_flags, read_flags
from sglang_sbs.router.options.sources import OPTIONS, VARIABLES

PD = ("--prefill", "http://p0:30000", "8998", "--decode", "http://d0:30000")
QUIET = ("--sbs-endforward-bind", "none")


def config(tmp_path: Path, text: str) -> tuple[str, str]:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return "--config", str(path)


FILE = """\
prefill:
  - http://p0:30000 8998
  - [http://p1:30000, 8999]
decode: http://d0:30000
policy: eta
port: 1234
sbs-gang-gate: off           # YAML reads a boolean
log_json: true
disable-retries: false
retry-jitter-factor: 0.5
request-id-headers: [x-a, x-b]
prometheus-duration-buckets: [0.5, 1]
sbs-tenant-header: x-tenant
sbs-tenant-weights: gold=3,free=0.5
service-discovery: true
prefill-selector: {app: sglang, component: prefill}
decode-selector: app=sglang component=decode
queue-size:                  # no value: as if it were not there
"""


def test_a_file_says_what_the_flags_say(tmp_path: Path) -> None:
    flags = [
        *PD,
        *("--prefill", "http://p1:30000", "8999", "--policy", "eta", "--port", "1234"),
        *("--sbs-gang-gate", "off", "--log-json", "--retry-jitter-factor", "0.5"),
        *("--request-id-headers", "x-a", "x-b", "--prometheus-duration-buckets", "0.5", "1"),
        *("--sbs-tenant-header", "x-tenant", "--sbs-tenant-weights", "gold=3,free=0.5"),
        *("--service-discovery", "--prefill-selector", "app=sglang", "component=prefill"),
        *("--decode-selector", "app=sglang", "component=decode"),
    ]
    assert parse_flags(config(tmp_path, FILE)) == parse_flags(flags)


def test_flags_go_before_variables_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "port: 1\npolicy: eta\nprefill: http://f:1\ndecode: http://d:1\nlog-json: true\n"
    file = config(tmp_path, text)
    monkeypatch.setenv("SGLANG_SBS_PORT", "2")
    monkeypatch.setenv("SGLANG_SBS_POLICY", "random")
    monkeypatch.setenv("SGLANG_SBS_LOG_JSON", "no")
    monkeypatch.setenv("SGLANG_SBS_PREFILL", "http://e1:1 8998; http://e2:1")
    monkeypatch.setenv("SGLANG_SBS_QUEUE_SIZE", " ")
    options, given = read_flags([*file, *QUIET, "--port", "3"])
    assert (options.port, options.scheduler.policy, options.log_json) == (3, "random", False)
    assert options.prefill == (("http://e1:1", 8998), ("http://e2:1", None))
    assert options.decode == ("http://d:1",)
    assert options.queue_size == 100
    assert {name: given.sources.get(name) for name in ("port", "policy", "decode", "host")} == {
        "port": "command line",
        "policy": "SGLANG_SBS_POLICY",
        "decode": file[1],
        "host": None,
    }
    assert parse_flags([*file, "--prefill", "http://c:1"]).prefill == (("http://c:1", None),)


@pytest.mark.parametrize("service", ["SGLANG_SBS", "SGLANG_SBS_PROMETHEUS"])
def test_variables_of_a_kubernetes_service_are_ignored(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod gets them for every Service of its namespace, ``sglang-sbs`` included."""
    monkeypatch.setenv(f"{service}_PORT", "tcp://10.96.0.12:80")
    monkeypatch.setenv(f"{service}_PORT_80_TCP_PORT", "80")
    monkeypatch.setenv(f"{service}_SERVICE_HOST", "10.96.0.12")
    monkeypatch.setenv(f"{service}_SERVICE_PORT", "80")
    assert parse_flags((*PD, *QUIET)).port == 30000
    monkeypatch.delenv(f"{service}_SERVICE_HOST")
    with pytest.raises(FlagError, match=f"^{service}_PORT: 'tcp://10.96.0.12:80' is not a port"):
        parse_flags((*PD, *QUIET))


def test_the_file_may_be_named_by_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SBS_CONFIG", config(tmp_path, "port: 7")[1])
    assert parse_flags(PD).port == 7


def test_every_flag_has_a_variable_of_its_own_and_can_be_in_a_file(tmp_path: Path) -> None:
    assert VARIABLES["SGLANG_SBS_TRIGGER"].flag == "sbs-trigger"
    assert VARIABLES["SGLANG_SBS_QUEUE_TIMEOUT_SECS"].flag == "queue-timeout-secs"
    assert VARIABLES["SGLANG_SBS_SBS_QUEUE_TIMEOUT_SECS"].flag == "sbs-queue-timeout-secs"
    flags = [variable.flag for variable in VARIABLES.values()]
    assert len(flags) == len(set(flags))
    without = {option.flag for option in OPTIONS.values() if option.help} - set(flags)
    assert without == set()
    switches = [option.flag for option in OPTIONS.values() if option.type is switch and option.help]
    text = "".join(f"{flag}: false\n" for flag in switches)
    assert parse_flags([*PD, *config(tmp_path, text)]) == parse_flags(PD)


def test_no_variable_of_engines_means_something_else_to_the_router() -> None:
    of_engines = {v for v in vars(hook).values() if isinstance(v, str) and v.startswith("SGLANG_")}
    assert len(of_engines) > 6
    assert of_engines & VARIABLES.keys() == {"SGLANG_SBS_ENDFORWARD_KEY_FILE"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("polcy: sbs", ["unknown key 'polcy'", "did you mean policy?"]),
        ("zzz: 1", ["unknown key 'zzz'", "a flag without its dashes"]),
        ("config: other.yaml", ["config: a file cannot name another one"]),
        ("worker-urls: x", ["worker-urls", "--prefill"]),
        ("port: 70000", [": port: '70000' is not a port"]),
        ("port: [1, 2]", [": port: write one value"]),
        ("port: 1\nport: 2", ["port is listed twice"]),
        ("log-json: maybe", [": log-json: write true or false"]),
        ("request-id-headers: [[a]]", ["lists and mappings"]),
        ("sbs-trigger: magic", [": sbs-trigger: invalid choice"]),
        ("policy: [", ["line 1"]),
        ("- policy", ["one key per flag"]),
        ("policy: sbs\n\tport: 1", ["line 2"]),
        ("policy: !!python/object:os.system x", ["could not determine a constructor"]),
    ],
)
def test_a_file_that_cannot_be_used_says_where_and_what(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    flags = config(tmp_path, text)
    with pytest.raises(FlagError) as error:
        parse_flags([*PD, *flags])
    for word in (*words, flags[1]):
        assert word in str(error.value)


def test_a_variable_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SBS_PORT", "x")
    with pytest.raises(FlagError, match="SGLANG_SBS_PORT: 'x' is not a port"):
        parse_flags(PD)
    monkeypatch.delenv("SGLANG_SBS_PORT")
    with pytest.raises(FlagError, match="No such file"):
        parse_flags([*PD, "--config", str(tmp_path / "gone")])


def test_a_secret_is_overruled_however_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("of-the-key-file")
    file = config(tmp_path, f"api-key-file: {key}\nadmin-api-key: boss")
    assert parse_flags([*PD, *file]).api_key == "of-the-key-file"
    assert parse_flags([*PD, *file, "--api-key", "mine"]).api_key == "mine"
    monkeypatch.setenv("SGLANG_SBS_API_KEY", "of-the-environment")
    assert parse_flags([*PD, *file]).api_key == "of-the-environment"
    assert parse_flags([*PD, "--api-key-file", str(key)]).api_key == "of-the-key-file"
    monkeypatch.setenv("SGLANG_SBS_ADMIN_KEY", "former name")
    assert parse_flags([*PD, *file]).admin_api_key == "former name"
    monkeypatch.setenv("SGLANG_SBS_ADMIN_API_KEY", "present name")
    assert parse_flags([*PD, *file]).admin_api_key == "present name"


def test_former_names_work_and_the_misleading_one_is_warned_about(tmp_path: Path) -> None:
    key = tmp_path / "secret"
    key.write_text("0" * 64)
    key.chmod(0o600)
    argv = ["--sbs-scheduler", "tcp://far:7700", "--workers", "2"]
    for name in ("--sbs-key-file", "--router-sbs-key-file"):
        options = parse_flags([*argv, name, str(key)])
        (warning,) = options.warnings
        assert "--sbs-key-file is called --sbs-scheduler-key-file now" in warning
        assert options.several.keys is not None
    argv = ["--sbs-scheduler", "tcp://far:7700", "--frontends", "2"]
    new = parse_flags([*argv, "--sbs-scheduler-key-file", str(key)])
    assert (new.warnings, new.workers, options.workers) == ((), 2, 2)


def test_the_configuration_is_printed_with_its_sources_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_SBS_ADMIN_API_KEY", "s3cret-1")
    text = "policy: eta\ncontrol-plane-api-keys: ['a:b:admin:s3cret-2']\nlog-json: on\n"
    text += "otlp-traces-endpoint: http://user:s3cret-3@host:4317\n"
    file = config(tmp_path, text)
    assert main(["--print-config", *PD, "--api-key", "s3cret-4", *QUIET, *file]) == 0
    out = capsys.readouterr().out
    assert "s3cret" not in out
    shown = yaml.safe_load(out)
    assert (shown["policy"], shown["port"], shown["log-json"]) == ("eta", 30000, True)
    assert shown["prefill"] == ["http://p0:30000 8998"]
    assert (shown["api-key"], shown["control-plane-api-keys"]) == ("***", ["***"])
    sources = {line.partition(":")[0]: line.rpartition("# ")[2] for line in out.splitlines()}
    found = {flag: sources[flag] for flag in ("policy", "api-key", "admin-api-key", "host")}
    assert found == {
        "policy": file[1],
        "api-key": "command line",
        "admin-api-key": "SGLANG_SBS_ADMIN_API_KEY",
        "host": "default",
    }


def test_what_is_printed_can_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*PD, *QUIET, "--policy", "eta", "--sbs-gang-gate", "off", "--log-json"]
    assert main(["--print-config", *flags]) == 0
    again = config(tmp_path, capsys.readouterr().out)
    assert parse_flags(again) == parse_flags(flags)


def test_check_examines_the_engines_of_flags_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examined: list[list[str]] = []
    monkeypatch.setattr("sglang_sbs.doctor.cli.main", lambda argv: examined.append(argv) or 1)
    file = config(tmp_path, "prefill: http://p0:1\ndecode: http://d0:1\npolicy: eta")
    assert main(["--check", *file, *QUIET]) == 1
    assert examined == [[*file, *QUIET]]
    assert main(["--check", *file, "--policy", "sbz"]) == 2
    assert main(["--check", "--pd-disaggregation", *QUIET]) == 0
    assert "no pair of engines" in capsys.readouterr().out
    assert len(examined) == 1


def test_help_shows_what_most_people_need_and_help_all_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag in ("--help", "-h", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 0
    text = capsys.readouterr().out
    assert len(MOST_NEEDED) == 8
    for option in OPTIONS.values():
        known = re.search(rf"--{option.flag}(?![\w-])", text) is not None
        assert known == bool(option.help and not option.hidden), option.flag
    shown = {
        s for a in build_parser()._actions if a.help != "==SUPPRESS==" for s in a.option_strings
    }
    assert {f"--{flag}" for flag in MOST_NEEDED} < shown
    assert not shown & {"--sbs-n-limit", "--sbs-t-default-ms", "--sbs-max-hold-ms", "--workers"}
