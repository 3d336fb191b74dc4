"""The flags of sglang_router 0.3.2 and what each is here, from both parsers."""

from __future__ import annotations

import argparse

from sglang_router.router_args import RouterArgs  # type: ignore[import-untyped]

from sglang_sbs.router.options.arguments import build_parser
from sglang_sbs.router.options.stock import IGNORED_FLAGS, REFUSED_FLAGS
from tools.reference.pages import head, table

_INTRODUCTION = """
*same*: same name, form and meaning. `launch_server`'s spelling `--router-FLAG` works for all of
them, in both launchers. How to move: [migration](../migration.md).
"""
NOTES = {
    "policy": "`sbs` and immediate policies; `cache_aware` becomes `sbs`, `bucket` `least_tokens`, "
    "`manual` becomes `session`, with a warning",
    "prefill": "without a port the router asks the engine for it",
    "max-concurrent-requests": "kept: with `--frontends N` shared out over the processes; each "
    "request of a batch or of `n` counts",
    "max-payload-size": "default 32 MiB instead of 512",
    "queue-size": "kept: further requests get 429 at once",
    "queue-timeout-secs": "for the admission limit; the scheduler's queue has "
    "`--sbs-queue-timeout-secs`",
    "health-check-endpoint": "by default a check that runs no forward pass (`/ready`, `/ping`)",
    "tokenizer-path": "a directory or an id on Hugging Face; for exact prompt lengths and prefixes",
    "api-key": "also sent to engines; `/server_info` requires it as well",
    "prometheus-duration-buckets": "for `smg_*` and `sbs_*` histograms",
    "rate-limit-tokens-per-second": "a request takes one token",
    "service-discovery": "needs `pip install 'sglang-sbs[kubernetes]'`",
    "jwt-issuer": "needs `pip install 'sglang-sbs[jwt]'`",
    "enable-trace": "needs `pip install 'sglang-sbs[trace]'`",
    "pd-disaggregation": "always on",
}
"""Remarks on flags that mean the same in both routers."""


def page() -> str:
    """``docs/reference/flag-mapping.md``."""
    stock = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(stock, use_router_prefix=False, exclude_host_port=False)
    ours = {s: a for a in build_parser()._actions for s in a.option_strings}
    rows = []
    for action in stock._actions:
        (flag,) = action.option_strings
        name = flag.removeprefix("--")
        if name in REFUSED_FLAGS:
            status, note = "error", REFUSED_FLAGS[name]
        elif name in IGNORED_FLAGS:
            status, note = "warning, no effect", IGNORED_FLAGS[name]
        elif flag not in ours:
            status, note = "error: unknown", ""
        else:
            status, note = "same", NOTES.get(name, "")
            if (before := shown(action.default)) != (now := shown(ours[flag].default)):
                note = f"default {now} instead of {before}" + (f"; {note}" if note else "")
        rows.append((f"`{flag}`", status, note))
    title = head("Flags of sglang_router 0.3.2")
    found = table(("flag of `sglang_router` 0.3.2", "here", "note"), rows)
    return "\n".join([title, _INTRODUCTION.lstrip("\n"), found, ""])


def shown(default: object) -> str:
    """A default as text; every kind of nothing is the same."""
    return f"`{default}`" if default not in (None, False, (), [], {}, "") else "none"
