"""The prose check: every rule catches its example, and stored counts can only fall."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.prose_check import RULES, findings, main, prose_of_page, prose_of_python

GOOD = '''"""A module that sends reports."""

LIMIT = 3
"""Largest number of open reports."""


def send(report: str) -> int:
    """Send one report and return the bytes written."""
    # The socket is non-blocking, so a partial write is possible.
    raise ValueError(f"report {report} is not valid JSON")
'''
BREAKS = {
    "opening": 'LIMIT = 3\n"""Of the reports that wait."""\n',
    "restates": 'def open_reports(of: str) -> int:\n    """The open reports."""\n',
    "person": "# The scheduler is for whoever asks, nobody else.\n",
    "speech": 'raise ValueError(f"{engine} says that it is full")\n',
    "negation": 'print("this answer is no list")\n',
    "amount": 'add_flag(help="wait so long for the first report")\n',
    "trailing": '"""A report is forgotten, too."""\n',
    "free relative": '"""What comes late is dropped."""\n',
    "length": "",
}


def broken(source: str) -> set[str]:
    prose = [*prose_of_python("module.py", source)]
    return {rule.name for rule in RULES for text in prose if rule.breaks(text)}


def test_plain_prose_breaks_no_rule() -> None:
    assert len([*prose_of_python("module.py", GOOD)]) == 5
    assert broken(GOOD) == set()


@pytest.mark.parametrize("rule", [rule.name for rule in RULES if rule.name != "length"])
def test_each_rule_catches_its_example(rule: str) -> None:
    assert rule in broken(BREAKS[rule])


@pytest.mark.parametrize(
    ("text", "breaks"),
    [
        ("A flag whose default is 0.", 0),
        ("An instance (`p0`) whose pass has ended.", 0),
        ("A rank on another node,\nwhose address is unknown.", 0),
        ("Whose message it is.", 1),
        ("The scheduler sends it. Whose turn comes is random.", 1),
        ("The engine for whom it waits, and whose pass ended.", 1),
    ],
)
def test_things_may_have_a_possessive(text: str, breaks: int) -> None:
    (rule,) = (rule for rule in RULES if rule.name == "person")
    (prose,) = prose_of_page("page.md", text)
    assert rule.breaks(prose) == breaks


def test_a_heading_may_be_a_free_relative_but_the_text_below_may_not() -> None:
    page = "# Title\n\n## What clients notice\nWhat they notice is less.\n\n- What comes late.\n"
    (rule,) = (rule for rule in RULES if rule.name == "free relative")
    paragraphs = [*prose_of_page("page.md", page)]
    assert [prose.line for prose in paragraphs if rule.breaks(prose)] == [4, 6]


def test_a_page_has_short_sentences_outside_code_and_tables() -> None:
    long = " ".join(["word"] * 26)
    page = f"# {long[:-5]}\n\n| a | {long[:60]} |\n\n```\n{long}\n```\n\nGood.\n{long}\nmore.\n"
    (rule,) = (rule for rule in RULES if rule.name == "length")
    paragraphs = [*prose_of_page("page.md", page)]
    assert [prose.line for prose in paragraphs if rule.breaks(prose)] == [9]


def test_counts_can_only_fall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, counts = tmp_path / "sglang_sbs" / "module.py", tmp_path / "counts.json"
    module.parent.mkdir()

    def check(source: str, *flags: str) -> int:
        module.write_text(source)
        return main(flags, tmp_path, counts)

    assert check(BREAKS["trailing"], "--lower") == 0
    assert check(BREAKS["trailing"] + BREAKS["negation"]) == 1
    assert "negation: 1 breaks, 0 allowed" in capsys.readouterr().err
    assert check(GOOD) == 0
    assert "--lower" in capsys.readouterr().out
    assert json.loads(counts.read_text())["trailing"] == 1
    assert check(GOOD, "--lower") == 0
    assert check(BREAKS["trailing"], "--lower") == 1
    assert json.loads(counts.read_text())["trailing"] == 0


def test_a_finding_has_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# Title\n\nThe engine is no server.\n")
    (found,) = findings(tmp_path)
    assert str(found) == "docs/page.md:3: negation: The engine is no server."


def test_help_names_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(rule.name in shown and rule.advice in shown for rule in RULES)


def test_the_project_keeps_to_its_counts() -> None:
    assert main([]) == 0
