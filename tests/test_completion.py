"""Completion of the console command, asked for as the shell's hook does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sglang-sbs si", {"simulate"}),
        ("sglang-sbs router --sbs-trig", {"--sbs-trigger"}),
        ("sglang-sbs router --sbs-trigger ", {"adaptive", "paper"}),
        ("sglang-sbs router --policy round", {"round_robin"}),
        ("sglang-sbs router --access-log ", {"all", "errors", "slow:2s"}),
        ("sglang-sbs router --sbs-n", set()),
        ("sglang-sbs server --pre", {"--prefill-instances", "--prefill-args"}),
        ("sglang-sbs simulate plan --slo-t", {"--slo-ttft"}),
        ("sglang-sbs demo --top", {"--topology"}),
        ("sglang-sbs nothing --x", set()),
    ],
)
def test_verbs_and_their_flags_are_offered(line: str, offered: set[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    subprocess.run(
        [sys.executable, "-c", "import sys; from sglang_sbs.cli import main; sys.exit(main())"],
        check=False,
        capture_output=True,
        env={**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)},
    )
    assert {word.strip() for word in words(answer)} == offered


def words(answer: Path) -> list[str]:
    text = answer.read_text() if answer.exists() else ""
    return [word for word in text.split("\v") if word]
