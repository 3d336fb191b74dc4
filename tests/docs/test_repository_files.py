"""The files that a host of the repository reads: the workflow, pre-commit's hooks, the citation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from doc_commands import ROOT

from sglang_sbs import __version__

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


@pytest.mark.parametrize(
    ("file", "schema"),
    [(WORKFLOW, "github-workflows"), (ROOT / "CITATION.cff", "citation-file-format")],
    ids=["workflow", "citation"],
)
def test_a_file_follows_its_schema(file: Path, schema: str) -> None:
    tool = Path(sys.executable).parent / "check-jsonschema"
    words = [str(tool), "--builtin-schema", f"vendor.{schema}", str(file)]
    checked = subprocess.run(words, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_workflow_runs_what_ci_runs_and_builds_the_site() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    commands = {name: [step.get("run") for step in job["steps"]] for name, job in jobs.items()}
    assert "bash .ci/run" in commands["test"]
    assert "scripts/docs build" in commands["site"]


def test_a_commit_is_checked_as_by_hand() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert (repository["repo"], hook["entry"]) == ("local", "scripts/check")
    assert (ROOT / hook["entry"]).stat().st_mode & 0o111


def test_everything_names_the_version_that_is_built() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    released = re.findall(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == (__version__, str(citation["date-released"]))
    assert f"Status: alpha ({__version__})." in (ROOT / "README.md").read_text()
    compose = (ROOT / "examples" / "compose" / ".env").read_text()
    assert f"SBS_VERSION={__version__}\n" in compose
    tags = re.findall(
        r"newTag: (\S+)", (ROOT / "examples" / "kubernetes" / "kustomization.yaml").read_text()
    )
    assert tags and {tag.rpartition("-")[2] for tag in tags} == {__version__}


def test_the_changelog_says_everything_once() -> None:
    """Its lines are merged by union, which doubles a part that moved meanwhile."""
    text = (ROOT / "CHANGELOG.md").read_text()
    entries = re.findall(r"^- .*$", text, re.M)
    assert len(entries) > 200
    assert {entry for entry in entries if entries.count(entry) > 1} == set()
    for release in text.split("\n## ")[1:]:
        sections = re.findall(r"^### .*$", release, re.M)
        assert len(sections) == len(set(sections)), release.partition("\n")[0]
