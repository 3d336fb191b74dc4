"""The command lines: the router's flags by groups, and every other verb."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import takewhile
from unittest import mock

from sglang_sbs.cli import VERBS
from sglang_sbs.router.options.arguments import MOST_NEEDED, build_parser
from tools.reference.pages import head, plain, table

OF_SIMULATE = ("plan", "trial")
_LIKE_THE_ROUTER = ("router", "scheduler")
_MOST_CHOICES_CHARS = 40
"""Longer ones are in the meaning of a flag, beside which they would leave no room."""
_ROUTER = """
`sglang-sbs router` and `python -m sglang_sbs.launch_router` take these flags, and so does
`sglang-sbs scheduler`. Every flag can also be a key of a YAML file (`--config`) or an
[environment variable](environment.md), and is accepted with the prefix `--router-`. `--help` shows
the first table, `--help-all` all of them. Flags of `sglang_router` without an effect here are in
the [flag mapping](flag-mapping.md).

## The flags that most people need
"""
_VERBS = """
`sglang-sbs VERB`. Verbs marked *in a checkout* are not in the wheel.
"""


class _Asked(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(words: list[str]) -> argparse.ArgumentParser:
    """The parser that prints the help of a verb."""

    def asked(_action: argparse.Action, parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Asked(parser)

    with mock.patch.object(argparse._HelpAction, "__call__", asked):
        try:
            import_module(VERBS[words[0]].module).main([*words[1:], "--help"])
        except _Asked as found:
            return found.parser
    raise RuntimeError(f"sglang-sbs {' '.join(words)} --help asks no parser for its help")


def router_page() -> str:
    """``docs/reference/router-flags.md``."""
    parser = build_parser("sglang-sbs router")
    shown = {flag: action for action in _shown(parser._actions) for flag in action.option_strings}
    first = [shown[f"--{flag}"] for flag in MOST_NEEDED]
    parts = [head("Router flags"), _ROUTER.lstrip("\n"), _rows(first), ""]
    return "\n".join([*parts, *_sections(parser, "##")])


def verbs_page() -> str:
    """``docs/reference/commands.md``."""
    parts = [head("Commands"), _VERBS.lstrip("\n")]
    others = [name for name in VERBS if name not in _LIKE_THE_ROUTER]
    places = {name: "router-flags.md" if name in _LIKE_THE_ROUTER else f"#{name}" for name in VERBS}
    rows = [(f"[`{name}`]({place})", VERBS[name].help) for name, place in places.items()]
    parts += [table(("verb", "what for"), rows), ""]
    for name in others:
        parts += _verb([name])
        if name == "simulate":
            for more in OF_SIMULATE:
                parts += _verb([name, more])
    return "\n".join(parts)


def _verb(words: list[str]) -> Iterator[str]:
    parser = parser_of(words)
    yield from (f"## {' '.join(words)}", "")
    if parser.description:
        yield from (plain(" ".join(parser.description.split())), "")
    example = re.split(r"^examples?:\s*$", parser.epilog or "", maxsplit=1, flags=re.MULTILINE)
    if len(example) == 2:
        indented, after = _indented(example[1].strip("\n").splitlines())
        yield from ("```text", *indented, "```", "", *([*after, ""] if after else []))
    yield from _sections(parser, "###")


def _indented(lines: list[str]) -> tuple[list[str], list[str]]:
    """The first lines, which are indented, and the others."""
    own = list(takewhile(lambda line: not line or line.startswith(" "), lines))
    least = min((len(line) - len(line.lstrip()) for line in own if line.strip()), default=0)
    return "\n".join(line[least:].rstrip() for line in own).rstrip().split("\n"), lines[len(own) :]


def _sections(parser: argparse.ArgumentParser, mark: str) -> Iterator[str]:
    """A table for each group of flags; those that argparse makes by itself are one, without a
    heading."""
    plain_groups = [parser._positionals, parser._optionals]
    actions = [action for group in plain_groups for action in _shown(group._group_actions)]
    if rows := _rows(actions):
        yield from (rows, "")
    for group in parser._action_groups:
        title, actions = group.title or "", list(_shown(group._group_actions))
        if actions and group not in plain_groups and not title.startswith("router: "):
            yield from (f"{mark} {title[:1].upper()}{title[1:]}", "", _rows(actions), "")


def _shown(actions: list[argparse.Action]) -> Iterator[argparse.Action]:
    return (action for action in actions if action.help != argparse.SUPPRESS)


def _rows(actions: list[argparse.Action]) -> str:
    rows = []
    for action in actions:
        if isinstance(action, argparse._HelpAction) and "--help-all" not in action.option_strings:
            continue
        text, default = _split(action)
        if _has_many_choices(action):
            text += f"; one of {', '.join(map(str, action.choices or ()))}"
        rows.append((_written(action), default, plain(text)))
    return table(("flag", "default", "meaning"), rows) if rows else ""


def _split(action: argparse.Action) -> tuple[str, str]:
    """Help without its default, and the default."""
    default = action.default
    text = (action.help or "") % {"default": default}
    if default in (None, False, (), [], "", argparse.SUPPRESS):
        return text, ""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    forms = "|".join(map(re.escape, (shown, str(default))))
    return re.sub(rf"\s*\((?:default:? )?(?:{forms})\)", "", text), f"`{shown}`"


def _has_many_choices(action: argparse.Action) -> bool:
    return len(",".join(map(str, action.choices or ()))) > _MOST_CHOICES_CHARS


def _written(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        if action.choices is not None and not _has_many_choices(action):
            value = " {" + ",".join(map(str, action.choices)) + "}"
        elif isinstance(action.metavar, tuple):
            value = " " + " ".join(action.metavar)
        else:
            value = f" {action.metavar or action.dest.upper()}"
        if not action.option_strings:
            return f"`{value.strip()}`"
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings)
