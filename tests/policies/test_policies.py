"""Policies: ours and others', found, listed, checked."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_sbs.policies import ImmediatePolicy, Plan, PolicySpec, PrefillPolicy
from sglang_sbs.policies.cli import main, markdown
from sglang_sbs.policies.conformance import CHECKS, Check, NonconformityError
from sglang_sbs.scheduling import policy_names, policy_registry
from sglang_sbs.scheduling.policy_registry import PolicyError, register, require

ROOT = Path(__file__).parents[2]
REQUESTS = 60


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers policies until the test has ended."""
    monkeypatch.setattr(policy_registry, "_specs", dict(policy_registry._specs))
    return register


def spec(name: str, make: Any, **more: Any) -> PolicySpec:
    words = dict.fromkeys(("summary", "choose_when", "trade_offs"), "Never.")
    return PolicySpec(name=name, make=make, **words, **more)


@pytest.mark.parametrize("name", policy_names())
def test_ours_conform(name: str) -> None:
    for check in CHECKS:
        check.run(name, REQUESTS)


class Broken(ImmediatePolicy):
    def __init__(self, choose: Any) -> None:
        super().__init__()
        self._choose = choose

    def choose(self, request: Any, instances: Any, now_s: float) -> Any:
        return self._choose(request, instances)


class Hoarder(PrefillPolicy):
    """Keeps one request for good."""

    holds = True

    def plan(self, queue: Any, instances: Any, admissible: Any, now_s: float) -> Plan:
        return Plan()


DRAWS = random.SystemRandom()
FIRST_SEEN: list[Any] = []


def stuck(_request: Any, instances: Any) -> Any:
    """Remembers an instance that may be down since."""
    FIRST_SEEN[:] = FIRST_SEEN or instances[:1]
    return FIRST_SEEN[0], 0


@pytest.mark.parametrize(
    ("make", "check", "says"),
    [
        (lambda _: Hoarder(), CHECKS[0], "was refused"),
        (lambda _: Broken(lambda _r, i: (DRAWS.choice(i), 0)), CHECKS[0], "seed what is random"),
        (lambda _: Broken(lambda _r, i: (i[0], i[0].dp_size)), CHECKS[0], "index out of range"),
        (lambda _: Broken(stuck), CHECKS[1], "not up"),
    ],
    ids=["holds for good", "unseeded", "no such rank", "remembers the dead"],
)
def test_what_does_not_conform_is_found(
    make: Any, check: Check, says: str, registered: Any
) -> None:
    registered(spec("broken", make))
    with pytest.raises((NonconformityError, IndexError), match=says):
        check.run("broken", REQUESTS)


def test_names_are_checked_and_taken_once(registered: Any) -> None:
    with pytest.raises(PolicyError, match="lower-case"):
        spec("Not-A-Name", None)
    with pytest.raises(PolicyError, match="decode='any' is not one of sbs, fewest_requests"):
        spec("picky", None, decode="any")
    with pytest.raises(PolicyError, match="another policy has this name"):
        registered(spec("eta", None))
    with pytest.raises(PolicyError, match="'nonesuch' is not one of sbs"):
        require("nonesuch")


PACKAGE = {
    "example_policy.py": (ROOT / "examples" / "own_policy" / "example_policy.py").read_text(),
    "broken_policy.py": "import nothing_of_this_name\n",
    "example_policy-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: example\nVersion: 1.0\n",
    "example_policy-1.0.dist-info/entry_points.txt": (
        "[sglang_sbs.policies]\n"
        "longest_idle = example_policy:POLICY\n"
        "broken = broken_policy:POLICY\n"
        "eta = example_policy:POLICY\n"
    ),
}


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", "from sglang_sbs.cli import main; raise SystemExit(main())", *words],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed package with a policy, one that cannot be imported, and a name that is taken."""
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_policy_of_a_package_appears_and_takes_no_other_with_it(package: Path) -> None:
    listed = run(package, "policies")
    assert listed.returncode == 0
    assert "\nlongest_idle " in listed.stdout
    assert "broken could not be loaded: ModuleNotFoundError" in listed.stderr
    assert "the entry point's name is 'eta', its policy's 'longest_idle'" in listed.stderr
    routed = run(package, "router", "--policy", "broken", "--pd-disaggregation")
    assert routed.returncode == 2
    assert "could not be loaded: ModuleNotFoundError" in routed.stderr


def test_a_policy_of_a_package_conforms_and_runs(package: Path) -> None:
    checked = run(package, "policies", "longest-idle", "--check")
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("  ok") == len(CHECKS)
    flags = ("--loads", "0.3", "--seeds", "1", "--duration", "21")
    done = run(package, "simulate", "paper-3k", "--policies", "longest_idle,eta", *flags)
    assert done.returncode == 0, done.stderr
    assert "longest_idle" in done.stdout


def test_a_module_named_in_the_environment_is_enough(package: Path) -> None:
    words = ("policies", "longest_idle")
    shown = run(package, *words, SGLANG_SBS_POLICIES="example_policies")
    assert "could not be loaded: ModuleNotFoundError" in shown.stderr
    (package / "example_policies.py").write_text(
        "from example_policy import POLICY\nPOLICIES = [POLICY]\n"
    )
    (package / "example_policy-1.0.dist-info" / "entry_points.txt").unlink()
    assert run(package, *words).returncode == 2
    shown = run(package, *words, SGLANG_SBS_POLICIES="example_policies")
    assert shown.returncode == 0
    assert "Choose it" in shown.stdout


def test_the_page_of_policies_says_what_the_code_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "policies.md").read_text()
    sections = [markdown(require(name)) for name in policy_names()]
    missing = [section.splitlines()[0] for section in sections if section not in page]
    assert missing == []
    assert page.count("\n## ") == len(sections)
    assert main(["--markdown"]) == 0
    assert capsys.readouterr().out == "\n".join(sections)
