"""The console command."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from sglang_sbs import __version__
from sglang_sbs.cli import VERBS, main


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
