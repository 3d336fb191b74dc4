"""Commands name a package that a plain install lacks before the work, with what to install.

``tests/packaging`` looks at a real plain install; here a package is hidden from this process.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from sglang_sbs.cli import VERBS
from sglang_sbs.cli import main as console_command


@pytest.mark.parametrize(
    "words",
    [
        "simulate paper-3k --plot {out}/x.html",
        "simulate plan --scenario paper-3k --slo-ttft 1 --plot {out}/x.png",
    ],
)
def test_a_picture_without_matplotlib_is_refused_before_anything_is_simulated(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("cli", "experiments.plan"):
        module = import_module(f"sglang_sbs.simulator.{name}")
        monkeypatch.setattr(module, "run_with_progress", simulated)
    with pytest.raises(SystemExit) as ended:
        console_command(words.format(out=tmp_path).split())
    assert ended.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def simulated(*_arguments: object) -> None:
    raise AssertionError("it simulated")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("demo", "scripts/install"),
        ("server --model-path /m --virtual-gpu", "scripts/install"),
        ("server --model-path /m", "pip install 'sglang>=0.5.11'"),
    ],
)
def test_engines_without_sglang_are_refused_before_anything_is_started(
    words: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    verb, *rest = words.split()
    with pytest.raises(SystemExit) as ended:
        import_module(VERBS[verb].module).main(rest)
    assert ended.value.code not in (0, None)
    said = capsys.readouterr().err + str(ended.value.code)
    assert remedy in said
    assert "not installed" in said


def test_the_demo_says_that_there_will_be_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = import_module(VERBS["demo"].module)

    def started(*_arguments: object, **_more: object) -> None:
        raise RuntimeError("the cluster is next")

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(demo, "running_rig", started)
    assert demo.main(["--out", str(tmp_path)]) == 1
    before, _, _ = capsys.readouterr().out.partition("the cluster is next")
    assert "pip install matplotlib" in before
