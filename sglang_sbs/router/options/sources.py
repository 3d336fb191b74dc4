"""Finds each flag's value: command line first, then environment, file and default. Values from
environment and file are turned into words of a command line, so all get the same checks."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.option import Option, switch
from sglang_sbs.router.options.stock import IGNORED_FLAGS, REFUSED_FLAGS
from sglang_sbs.router.options.table import GROUPS

DEFAULT, ON_COMMAND_LINE = "default", "command line"
_PREFIX = "SGLANG_SBS_"
_FORMER_VARIABLES = {
    "SGLANG_SBS_ADMIN_KEY": "admin-api-key",
    "SGLANG_SBS_CONTROL_PLANE_KEYS": "control-plane-api-keys",
}
SECRETS = ("api-key", "admin-api-key", "control-plane-api-keys")
"""Flags that also exist as ``--x-file``. A source that sets either of the two replaces both from
sources of lower precedence."""
_SWITCHES = dict.fromkeys(("1", "true", "yes", "on"), True)
_SWITCHES |= dict.fromkeys(("0", "false", "no", "off"), False)


class Sourced(NamedTuple):
    """Parsed flags, completed from the environment and the configuration file."""

    args: argparse.Namespace
    sources: dict[str, str]
    """Name of each value's source by ``dest``: command line, variable or file. Flags with their
    default are missing."""
    former: tuple[str, ...]
    """Warnings about flags given by a former name."""


class _Entry(NamedTuple):
    source: str
    where: str
    """Source and its key or variable, for error messages."""
    option: Option
    value: Any
    """Value as it is written there: a text, number, boolean, list or mapping."""


class _Layer(NamedTuple):
    values: dict[str, Any]
    """Parsed values by ``dest`` of their flags."""
    sources: dict[str, str]


OPTIONS = {option.flag: option for option in chain(*GROUPS.values()) if not option.internal}
"""All options that users may set, by flag."""


def _variable(flag: str) -> str:
    """Return a flag's environment variable: ``SGLANG_SBS_`` and the flag in capitals, without
    ``sbs-`` unless another flag has that name."""
    short = flag.removeprefix("sbs-")
    name = flag if short in OPTIONS else short
    return _PREFIX + name.upper().replace("-", "_")


VARIABLES = {
    _variable(flag): option for flag, option in OPTIONS.items() if flag not in IGNORED_FLAGS
}


def read_sources(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Sourced:
    """Parse ``argv`` and fill in this process's environment and the file. Changes the parser's
    defaults. Raises: FlagError, naming the flag and the variable or the file."""
    defaults = _take_defaults(parser)
    flags = vars(parser.parse_args(list(argv)))
    from_flags = _Layer(flags, dict.fromkeys(flags, ON_COMMAND_LINE))
    from_environment = _layer(parser, _in_environment())
    path = flags.get("config") or from_environment.values.get("config")
    from_file = _layer(parser, _in_file(Path(path))) if path else _Layer({}, {})
    values, sources = dict(defaults), dict[str, str]()
    for layer in (from_file, from_environment, from_flags):
        for secret in SECRETS:
            pair = [name.replace("-", "_") for name in (secret, f"{secret}-file")]
            if any(name in layer.values for name in pair):
                values |= {name: defaults[name] for name in pair}
                for name in pair:
                    sources.pop(name, None)
        values |= layer.values
        sources |= layer.sources
    return Sourced(argparse.Namespace(**values), sources, tuple(_former(argv)))


def _take_defaults(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Remove all defaults from the parser and return them by ``dest``. Afterwards the parser
    returns only flags that were given."""
    given = [action for action in parser._actions if action.default is not argparse.SUPPRESS]
    defaults = {action.dest: action.default for action in given}
    for action in given:
        action.default = argparse.SUPPRESS
    return defaults


def _former(argv: Sequence[str]) -> Iterator[str]:
    names = {word.partition("=")[0].removeprefix("--").removeprefix("router-") for word in argv}
    for option in OPTIONS.values():
        if option.former in names and option.why_renamed:
            yield f"--{option.former} is called --{option.flag} now: {option.why_renamed}"


def _layer(parser: argparse.ArgumentParser, entries: Iterable[_Entry]) -> _Layer:
    layer = _Layer({}, {})
    for source, where, option, value in entries:
        try:
            if option.type is switch:
                found = {option.dest: _switched(value)}
            else:
                found = vars(parser.parse_args(_words(option, value)))
        except ValueError as error:
            text = str(error).removeprefix(f"argument --{option.flag}: ")
            raise FlagError(f"{where}: {text}") from None
        layer.values.update(found)
        layer.sources.update(dict.fromkeys(found, source))
    return layer


def _switched(value: Any) -> bool:
    found = value if isinstance(value, bool) else _SWITCHES.get(str(value).lower())
    if found is None:
        raise ValueError(f"write true or false, not {value!r}")
    return found


def _words(option: Option, value: Any) -> list[str]:
    """Return a flag with its value as words of a command line. Raises: ValueError, the value has
    the wrong form."""
    flag = f"--{option.flag}"
    if option.repeated:
        entries = value if isinstance(value, list) else [value]
        return [word for entry in entries for word in (flag, *_texts(entry))]
    if option.nargs is not None:
        return [flag, *_texts(value)]
    if isinstance(value, list | dict):
        raise ValueError("write one value, not a list or a mapping")
    return [f"{flag}={_text(value)}"]


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{_text(key)}={_text(item)}" for key, item in value.items()]
    if isinstance(value, list):
        return [_text(item) for item in value]
    return _text(value).split()


def _text(value: Any) -> str:
    if isinstance(value, bool):  # YAML's on and off, which some flags take as words
        return "on" if value else "off"
    if isinstance(value, list | dict):
        raise ValueError("lists and mappings cannot be inside one another here")
    return str(value)


# The environment ------------------------------------------------------------------------------


def _in_environment() -> Iterator[_Entry]:
    former = {name: OPTIONS[flag] for name, flag in _FORMER_VARIABLES.items()}
    for name, option in (former | VARIABLES).items():
        text = os.environ.get(name, "").strip()
        if _is_service_link(name, text):
            continue
        if text and option.repeated:
            entries = [entry for entry in text.replace("\n", ";").split(";") if entry.strip()]
            yield _Entry(name, name, option, entries)
        elif text:
            yield _Entry(name, name, option, text)


def _is_service_link(name: str, text: str) -> bool:
    """Return whether Kubernetes set the variable. For each Service of its namespace a pod gets
    ``NAME_PORT=tcp://ADDRESS:PORT``; that of a Service ``sglang-sbs`` has the name of ours."""
    service = name.removesuffix("_PORT")
    return service != name and "://" in text and f"{service}_SERVICE_HOST" in os.environ


# The file -------------------------------------------------------------------------------------


def _in_file(path: Path) -> Iterator[_Entry]:
    for key, value in _mapping_in(path).items():
        name = str(key).replace("_", "-")
        if name in REFUSED_FLAGS:
            raise FlagError(f"{path}: {key}: {REFUSED_FLAGS[name]}")
        if name == "config":
            raise FlagError(f"{path}: {key}: a file cannot name another one")
        option = OPTIONS.get(name) or next((o for o in OPTIONS.values() if o.former == name), None)
        if option is None:
            near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else "; a key is a flag without its dashes"
            raise FlagError(f"{path}: unknown key {str(key)[:64]!r}{hint}")
        if value is not None:
            yield _Entry(str(path), f"{path}: {key}", option, value)


def _mapping_in(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text)
        top = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise FlagError(f"--config {path}: {error.strerror or error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise FlagError(f"--config {path}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FlagError(f"--config {path}: it is not YAML ({type(error).__name__})") from None
    if not isinstance(found, dict | None):
        raise FlagError(f"--config {path}: write one key per flag, e.g. policy: sbs")
    keys = [key.value for key, _ in top.value] if found else []
    for key in keys:  # YAML would silently keep the last one.
        if keys.count(key) > 1:
            raise FlagError(f"--config {path}: {key} is listed twice")
    return found or {}
