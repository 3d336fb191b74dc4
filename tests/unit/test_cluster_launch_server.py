"""The launcher's command line: which flag goes where, and what it says when one is wrong."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from sglang_sbs import launch_server
from sglang_sbs.cluster.plan import PlanError
from sglang_sbs.console import checkout
from sglang_sbs.launch_server import main, split_flags


def test_flags_are_split_between_engines_and_router() -> None:
    engine, router = split_flags(
        shlex.split(
            "--tp 2 --router-policy sbs --dp-size=2 --router-selector a=b c=d --sbs-trigger paper "
            "--enable-dp-attention --router-max-concurrent-requests -1 --prefill-policy random"
        )
    )
    assert shlex.join(engine) == "--tp 2 --dp-size=2 --enable-dp-attention"
    assert shlex.join(router) == (
        "--policy sbs --selector a=b c=d --sbs-trigger paper --max-concurrent-requests -1 "
        "--prefill-policy random"
    )


def test_a_value_without_a_flag_is_refused() -> None:
    with pytest.raises(PlanError, match="'sbs' belongs to no flag"):
        split_flags(["sbs", "--tp", "2"])


def test_dry_run_prints_every_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(
        "--model-path /m --prefill-instances 3 --tp 2 --dp 2 --enable-dp-attention --policy sbs "
        f"--log-dir {tmp_path} --dry-run --virtual-gpu {{}}".split()
    )
    printed = capsys.readouterr().out
    names = [line for line in printed.splitlines() if line.startswith("#")]
    assert names == ["# prefill-0", "# prefill-1", "# prefill-2", "# decode-0", "# router"]
    assert printed.count("-m sglang.launch_server --model-path /m") == 4
    assert "--policy sbs" in printed.splitlines()[-1]
    assert "SGLANG_SBS_VGPU=" in printed


def test_role_flags_are_split_like_a_shell_does(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model-path", "/m", "--prefill-args=--a 'b c'", "--decode-args=--d", "--dry-run"])
    prefill, decode, _router = (
        line for line in capsys.readouterr().out.splitlines() if line and line[0] != "#"
    )
    assert prefill.endswith("--a 'b c'")
    assert decode.endswith("--d")


def test_an_open_quote_in_role_flags_is_a_message_that_names_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model-path", "/m", "--decode-args=--chat-template it's", "--dry-run"])
    assert ended.value.code == 2
    assert "--decode-args: no closing quotation" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--cpu", "--virtual-gpu"])
def test_a_wheel_says_where_engines_on_cpu_can_be_had(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkout, "CHECKOUT", tmp_path)
    with pytest.raises(SystemExit):
        main(["--model-path", "/m", "--dry-run", flag])
    assert "--cpu and --virtual-gpu: not in an installed wheel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--model-path"),
        (["--model-path", "/m", "--decode-instances", "0"], "--decode-instances must be at least"),
        (["--model-path", "/m", "--virtual-gpu", "{]"], "--virtual-gpu: .* is not valid JSON"),
        (["--model-path", "/m", "--disaggregation-mode", "prefill"], "use --prefill-instances"),
        (["--model-path", "/m", "--port", "70000"], "--port: '70000' is not a port"),
    ],
)
def test_a_bad_flag_ends_with_a_message_that_names_it(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--dry-run"])
    assert ended.value.code == 2
    assert re.search(complaint, capsys.readouterr().err)


def test_a_log_folder_that_cannot_be_made_is_reported_with_its_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_server, "without_sglang", lambda *_, **__: None)
    ports = ("--port", "0", "--router-prometheus-port", "0")
    with pytest.raises(SystemExit, match=r"^--log-dir /dev/null/x: Not a directory$"):
        main(["--model-path", "/m", "--log-dir", "/dev/null/x", *ports])


def test_help_teaches_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--router-policy sbs" in capsys.readouterr().out
