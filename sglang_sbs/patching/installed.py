"""Finds SGLang and ``sglang_router`` in an environment by their metadata, without importing
them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGES = ("sglang", "sglang-router")
_PLUGIN_FRAMEWORK = "sglang/srt/plugins/hook_registry.py"


@dataclass(frozen=True)
class Installed:
    package: str
    version: str
    root: Path
    """Folder that contains the package's import package."""
    editable: Path | None
    """Checkout of an editable install; None for any other install."""

    @property
    def has_plugins(self) -> bool:
        """Whether SGLang loads plugins itself (0.5.11 and later)."""
        return self.package == "sglang" and (self.root / _PLUGIN_FRAMEWORK).is_file()

    @property
    def is_source_build(self) -> bool:
        """Whether the package was built from a checkout without tags, which gives it version
        0.0.0."""
        return self.version.startswith("0.0.0")


def find_installed(site: Path | None = None) -> list[Installed]:
    """Return the installed :data:`PACKAGES` in ``site``, or where this interpreter imports from."""
    found: dict[str, Installed] = {}
    for distribution in importlib.metadata.distributions(
        path=sys.path if site is None else [str(site)]
    ):
        # Broken metadata (e.g. of an interrupted installation) has no name. The finder of the
        # importlib_metadata package, which other packages install, raises in this case.
        try:
            name = re.sub(r"[-_.]+", "-", str(distribution.metadata["Name"] or "")).lower()
        except FileNotFoundError:
            continue
        if name in PACKAGES and name not in found:
            found[name] = Installed(
                name,
                str(distribution.version),
                Path(str(distribution.locate_file(""))).resolve(),
                _editable(distribution),
            )
    return [found[name] for name in PACKAGES if name in found]


def _editable(distribution: importlib.metadata.Distribution) -> Path | None:
    """Return the checkout of an editable install (PEP 610); None for any other install."""
    text = distribution.read_text("direct_url.json")
    try:
        origin = json.loads(text or "{}")
    except json.JSONDecodeError:
        return None
    if not isinstance(origin, dict) or not (origin.get("dir_info") or {}).get("editable"):
        return None
    return Path(unquote(urlsplit(str(origin.get("url", ""))).path))
