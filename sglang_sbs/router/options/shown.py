"""``--print-config``: what every flag says, and where."""

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
    """The configuration in force as YAML, a comment on each line with its source. Secrets and
    logins in URLs are masked, so masked values have to be written anew before it is used as a file.
    """
    return "\n".join(_lines(given)) + "\n"


def _lines(given: Sourced) -> Iterator[str]:
    for flag, option in OPTIONS.items():
        source = given.sources.get(option.dest, DEFAULT)
        if flag == "config" or (flag in IGNORED_FLAGS and source == DEFAULT):
            continue
        value = _shown(option, getattr(given.args, option.dest))
        yield f"{f'{flag}: {json.dumps(value, ensure_ascii=False)}':<56}  # {source}"


def _shown(option: Option, value: Any) -> Any:
    """A value as JSON has it."""
    if value in ((), []):
        return None
    if isinstance(value, list | tuple):
        if option.repeated:
            return [text_without_secrets(" ".join(entry)) for entry in value]
        return [_shown(option, one) for one in value]
    if option.flag in SECRETS and value is not None:
        return _HIDDEN
    if isinstance(value, Path):
        return str(value)
    return text_without_secrets(value) if isinstance(value, str) else value
