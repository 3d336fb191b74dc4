"""The command line of a PD router, whoever made it, in front of engines."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def router_argv(
    prefill: Iterable[tuple[str, int | None]],
    decode: Iterable[str],
    module: str = "sglang_sbs.launch_router",
) -> list[str]:
    """Argv for engines at these URLs (prefill with bootstrap port); the router's flags follow."""
    argv = [sys.executable, "-m", module, "--pd-disaggregation"]
    for url, bootstrap_port in prefill:
        argv += ["--prefill", url, *([] if bootstrap_port is None else [str(bootstrap_port)])]
    for url in decode:
        argv += ["--decode", url]
    return argv
