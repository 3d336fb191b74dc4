"""The console command."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from sglang_sbs import __version__, cli
from sglang_sbs.cli import VERBS, main
from sglang_sbs.console import checkout

IN_A_CHECKOUT = [verb for verb in VERBS if VERBS[verb].module.startswith("benchmarks.")]


def test_help_lists_every_verb(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_an_unknown_verb_names_the_known_ones(capsys):
    assert main(["rooter"]) == 2
    assert "router" in capsys.readouterr().err


def test_a_terminal_that_is_not_utf_8_gets_question_marks(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    monkeypatch.setattr(cli, "_main_of", lambda _verb: lambda _words: print("rank 0 …"))
    assert main(["top"]) == 0
    assert written.getvalue() == b"rank 0 ?\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_teaches_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        sys.exit(import_module(VERBS[verb].module).main(["--help"]))
    assert stop.value.code in (0, None)
    assert "example" in capsys.readouterr().out.lower()


def test_the_router_needs_neither_torch_nor_sglang():
    code = (
        "import sys, sglang_sbs.launch_router, sglang_sbs.scheduling, sglang_sbs.simulator, "
        "sglang_sbs.engine; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'sglang', 'transformers')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", IN_A_CHECKOUT)
def test_what_is_not_in_the_wheel_is_found_from_any_folder(verb: str, tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from sglang_sbs.cli import main\n"
        "sys.path.pop(0); sys.exit(main(sys.argv[2:]))"
    )
    command = [sys.executable, "-I", "-c", program, str(checkout.CHECKOUT), verb, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert f"sglang-sbs {verb} --" in done.stdout


@pytest.mark.parametrize("verb", IN_A_CHECKOUT)
def test_a_wheel_says_where_to_get_what_it_lacks(
    verb: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checkout, "CHECKOUT", tmp_path)
    assert main([verb, "--dp", "2"]) == 2
    assert f".venv/bin/sglang-sbs {verb}" in capsys.readouterr().err
    assert main([verb, "--help"]) == 0
    assert f".venv/bin/sglang-sbs {verb}" in capsys.readouterr().out
