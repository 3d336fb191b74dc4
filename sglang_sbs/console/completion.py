"""Completion of `sglang-sbs` in a shell, by argcomplete (the extra `completion`).

A verb's module creates its parser inside its `main`. So completion runs `main` with the typed words
until it calls a parser, and completes with that parser.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

ASKED = "_ARGCOMPLETE"
"""Environment variable that the shell's hook sets to ask for completions, which it accepts only
from this process."""


def complete(
    verbs: Sequence[str], main_of: Callable[[str], Callable[[Sequence[str]], Any]]
) -> None:
    """Answer the shell and end the process; returns if nothing can be completed."""
    try:
        import argcomplete
        from argcomplete.lexers import split_line
    except ImportError:
        return
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    typed = split_line(line, point)[3][1:]
    if not typed:
        parser = argparse.ArgumentParser()
        parser.add_argument("--version", action="store_true")
        parser.add_argument("verb", choices=verbs)
        argcomplete.autocomplete(parser)
    elif typed[0] in verbs:
        parse = argparse.ArgumentParser.parse_known_args

        def first(parser: argparse.ArgumentParser, words: Sequence[str], *_: Any) -> NoReturn:
            argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
            os.environ[ASKED] = str(1 + len(typed) - len(words))
            argcomplete.autocomplete(parser)
            raise SystemExit(1)

        argparse.ArgumentParser.parse_known_args = first  # type: ignore[method-assign, assignment]
        main_of(typed[0])(typed[1:])
