"""Prints the configuration in force for ``--print-config``: value and source of each flag."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_sbs.router.engine_secrets import text_without_secrets
from sglang_sbs.router.options.option import Option
from sglang_sbs.router.options.sources import DEFAULT, OPTIONS, SECRETS, Sourced
from sglang_sbs.router.options.stock import IGNORED_FLAGS

_HIDDEN = "***"


def shown_config(given: Sourced) -> str:
    """Return the configuration in force as YAML, with its source as a comment on each line. Secrets
    and logins in URLs are masked: fill them in before using the text as a file."""
    return "\n".join(_lines(given)) + "\n"


def _lines(given: Sourced) -> Iterator[str]:
    for flag, option in OPTIONS.items():
        source = given.sources.get(option.dest, DEFAULT)
        if flag == "config" or (flag in IGNORED_FLAGS and source == DEFAULT):
            continue
        value = _shown(option, getattr(given.args, option.dest))
        yield f"{f'{flag}: {json.dumps(value, ensure_ascii=False)}':<56}  # {source}"


def _shown(option: Option, value: Any) -> Any:
    """Return a flag's value in JSON types, with secrets masked."""
    if value in ((), []):
        return None
    if isinstance(value, list | tuple):
        if option.repeated:
            return [text_without_secrets(" ".join(entry)) for entry in value]
        return [_shown(option, item) for item in value]
    if option.flag in SECRETS and value is not None:
        return _HIDDEN
    if isinstance(value, Path):
        return str(value)
    return text_without_secrets(value) if isinstance(value, str) else value
