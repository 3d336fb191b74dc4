"""Checks for requirements of a verb or flag that a plain install lacks, before its work begins."""

from __future__ import annotations

from importlib.util import find_spec

_CPU = (
    "in a checkout of sglang-sbs, `scripts/install` sets up SGLang on CPU in .venv; then "
    "`.venv/bin/sglang-sbs {verb} ...`"
)


def only_in_a_checkout(verb: str) -> str:
    """Explain where ``sglang-sbs VERB`` is available, for verbs missing in a wheel."""
    return f"not in an installed wheel; {_CPU.format(verb=verb)}"


def without_matplotlib() -> str | None:
    """Explain how to install matplotlib, which figures need; ``None``: installed."""
    if find_spec("matplotlib") is not None:
        return None
    return "matplotlib is not installed: pip install matplotlib, or pip install 'sglang-sbs[sim]'"


def without_sglang(verb: str, *, on_cpu: bool) -> str | None:
    """Explain how to get the engines that ``sglang-sbs VERB`` starts; ``None``: available."""
    if find_spec("sglang") is not None:
        return None
    how = _CPU.format(verb=verb) if on_cpu else "pip install 'sglang>=0.5.11'"
    return f"sglang, whose engines `sglang-sbs {verb}` starts, is not installed here: {how}"


def without_jwt() -> str | None:
    """Explain how to install the package that checks OIDC tokens; ``None``: installed."""
    if all(find_spec(name) is not None for name in ("jwt", "cryptography")):  # for signatures
        return None
    return "pip install 'sglang-sbs[jwt]'"


def without_kubernetes() -> str | None:
    """Explain how to install the package that finds workers as pods; ``None``: installed."""
    return None if find_spec("kubernetes_asyncio") else "pip install 'sglang-sbs[kubernetes]'"
