"""The environment variables: of the router's flags, of the engine plugin, and of others that are
read. What those mean that are no flags is kept from the page."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_sbs.engine import config as plugin
from sglang_sbs.router.options.sources import VARIABLES
from tools.reference.pages import head, kept, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = "reference/environment.md"
_OURS = re.compile(r"\"(SGLANG_SBS_[A-Z_]*[A-Z])\"")
_READ = re.compile(r"(?:environ|getenv)(?:\.get)?[(\[]\s*\"([A-Z][A-Z_]+)\"")
_INTERNAL = {"COMP_LINE", "COMP_POINT"}
"""Set by shells for one another's programs."""


def page() -> str:
    """``docs/reference/environment.md``."""
    meaning = {cells[0].strip("`"): text for cells, text in kept(PAGE, 1).items()}
    of_plugin = sorted(
        value
        for value in vars(plugin).values()
        if isinstance(value, str) and _OURS.fullmatch(f'"{value}"')
    )
    sources = [path.read_text() for path in (ROOT / "sglang_sbs").rglob("*.py")]
    written = {name for text in sources for name in _OURS.findall(text)}
    others = sorted(written - set(of_plugin) - VARIABLES.keys())
    read = {name for text in sources for name in _READ.findall(text)}
    foreign = sorted(read - written - _INTERNAL)

    def rows(names: list[str]) -> list[tuple[str, str]]:
        return [(f"`{name}`", meaning.get(name, "")) for name in names]

    flags = sorted(VARIABLES.items())
    return "\n".join(
        [
            head("Environment variables", "Meanings are by hand."),
            "A flag goes before a variable, a variable before a file (`--config`), the file before",
            "the default. An empty variable counts as unset.",
            "",
            "## On engines",
            "",
            "The plugin reads these in every process of an engine. Without `SGLANG_SBS_ROUTERS` or",
            "`SGLANG_SBS_BIND` it does nothing.",
            "",
            table(("variable", "meaning"), rows(of_plugin)),
            "",
            "## Other variables",
            "",
            table(("variable", "meaning"), rows(others)),
            "",
            "## Variables of others",
            "",
            table(("variable", "meaning"), rows(foreign)),
            "",
            "## Flags of the router",
            "",
            "Entries of repeated flags are separated by `;`.",
            "What they mean is on the page [router flags](router-flags.md).",
            "",
            table(("variable", "flag"), [(f"`{n}`", f"`--{option.flag}`") for n, option in flags]),
            "",
        ]
    )
