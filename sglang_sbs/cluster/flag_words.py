"""Reads and filters the words of a command line that is passed on."""

from __future__ import annotations

from collections.abc import Sequence


def text_flag(flags: Sequence[str], name: str) -> str:
    """Return the value of the last `name` in `flags`, in either spelling of router flags; empty if
    absent."""
    names = (name, name.replace("--", "--router-", 1))
    value = ""
    for index, word in enumerate(flags):
        given, equals, text = word.partition("=")
        if given in names:
            value = text if equals else "".join(flags[index + 1 : index + 2])
    return value


def without_given(defaults: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return `defaults`, a list of flags with at most one value each, without the flags that
    `given` contains."""
    given_names = {word.partition("=")[0] for word in given}
    kept: list[str] = []
    keep = True
    for word in defaults:
        if word.startswith("--"):
            keep = word.partition("=")[0] not in given_names
        if keep:
            kept.append(word)
    return kept
