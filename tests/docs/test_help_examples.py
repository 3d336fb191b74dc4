"""The examples in every ``--help`` are understood, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module

import pytest
from command_checks import check
from doc_commands import Command, commands_of

from sglang_sbs.cli import VERBS, usage

VERBS_OF_SIMULATE = ("plan", "trial")
_EXAMPLE = re.compile(r"^\s+((?:[A-Z_]+=\S+ )?(?:sglang-sbs|python -m|scripts/|curl|pip)\b.*)$")


def helps() -> Iterator[tuple[str, list[str]]]:
    """A name, and the words after ``sglang-sbs`` that print a help."""
    for verb in VERBS:
        yield verb, [verb, "--help"]
    for verb in VERBS_OF_SIMULATE:
        yield f"simulate {verb}", ["simulate", verb, "--help"]


def examples_of(text: str, name: str) -> list[Command]:
    """The commands that are lines of a help; what follows two spaces is said about them."""
    lines, continues = [], False
    for line in text.splitlines():
        example = _EXAMPLE.match(line)
        if example is None and not continues:
            continue
        words = (line if example is None else example[1]).strip()
        continues = words.endswith("\\")
        lines.append(re.split(r"\s{2,}", words.replace("[flags]", ""), maxsplit=1)[0])
    return commands_of("\n".join(["```bash", *lines, "```"]), f"{name} --help")


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        import_module(VERBS[words[0]].module).main(words[1:])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("readers_folder")
@pytest.mark.parametrize(("name", "words"), list(helps()), ids=str)
def test_examples_of_a_help_are_understood(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, epilog = help_of(words, capsys).partition("example")
    examples = examples_of(epilog, name)
    assert examples, "a help teaches with an example"
    for example in examples:
        if example.words[1:] not in [("simulate", verb) for verb in VERBS_OF_SIMULATE]:
            check(example)


@pytest.mark.usefixtures("readers_folder")
def test_the_example_of_the_command_itself_is_understood() -> None:
    (example,) = examples_of(usage().partition("example:")[2], "sglang-sbs")
    check(example)
