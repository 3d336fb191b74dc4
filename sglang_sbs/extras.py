"""What a verb needs beyond a plain install, looked for before its work begins.

Must not know what a verb does.
"""

from __future__ import annotations

from importlib.util import find_spec

_CPU = (
    "in a checkout of sglang-sbs, `scripts/install` sets up SGLang on CPU in .venv; then "
    "`.venv/bin/sglang-sbs {verb} ...`"
)


def without_matplotlib() -> str | None:
    """What to install to draw pictures; ``None``: it is there."""
    if find_spec("matplotlib") is not None:
        return None
    return "matplotlib is not installed: pip install matplotlib"


def without_sglang(verb: str, *, on_cpu: bool) -> str | None:
    """How to get the engines that ``sglang-sbs VERB`` starts; ``None``: they are there."""
    if find_spec("sglang") is not None:
        return None
    how = _CPU.format(verb=verb) if on_cpu else "pip install 'sglang>=0.5.11'"
    return f"sglang, whose engines `sglang-sbs {verb}` starts, is not installed here: {how}"
