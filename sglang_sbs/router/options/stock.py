"""Flags and policies of ``sglang_router.launch_router`` 0.3.2 that mean nothing to this router.

An existing command line keeps working with them. Each is accepted and warned about once; the reason
tells the user what is lost.
"""

from __future__ import annotations

from typing import Literal

from sglang_sbs.scheduling.policy_names import Policy

Arity = Literal["flag", "one", "many"]

_CACHE = "no caches are guessed at here: sbs knows what each DP rank holds"
_ONE_MODEL = "this router serves the one model of its workers"
_DISCOVERY = "workers are prefill or decode here: --prefill-selector and --decode-selector"
_RESPONSES = "the Responses API and its storage are not served here"
_TOKENIZER_CACHE = "token counts are not cached here"
_PARSER = "set it on the engines: they parse"

IGNORED_FLAGS: dict[str, tuple[Arity, str]] = {
    "cache-threshold": ("one", _CACHE),
    "balance-abs-threshold": ("one", _CACHE),
    "balance-rel-threshold": ("one", _CACHE),
    "bucket-adjust-interval-secs": ("one", _CACHE),
    "eviction-interval-secs": ("one", _CACHE),
    "max-tree-size": ("one", _CACHE),
    "max-idle-secs": ("one", _CACHE),
    "assignment-mode": ("one", _CACHE),
    "prefill-policy": ("one", "prefill and decode are chosen together, by --policy"),
    "decode-policy": ("one", "prefill and decode are chosen together, by --policy"),
    "dp-aware": ("flag", "DP ranks are always chosen here"),
    "enable-igw": ("flag", _ONE_MODEL),
    "mini-lb": ("flag", "there is one router here, and it is fit for production"),
    "selector": ("many", _DISCOVERY),
    "model-path": ("one", "token counting wants --tokenizer-path"),
    "tokenizer-cache-enable-l0": ("flag", _TOKENIZER_CACHE),
    "tokenizer-cache-l0-max-entries": ("one", _TOKENIZER_CACHE),
    "tokenizer-cache-enable-l1": ("flag", _TOKENIZER_CACHE),
    "tokenizer-cache-l1-max-memory": ("one", _TOKENIZER_CACHE),
    "reasoning-parser": ("one", _PARSER),
    "tool-call-parser": ("one", _PARSER),
    "mcp-config-path": ("one", _RESPONSES),
    "backend": ("one", "workers are SGLang engines"),
    "history-backend": ("one", _RESPONSES),
    "oracle-wallet-path": ("one", _RESPONSES),
    "oracle-tns-alias": ("one", _RESPONSES),
    "oracle-connect-descriptor": ("one", _RESPONSES),
    "oracle-username": ("one", _RESPONSES),
    "oracle-password": ("one", _RESPONSES),
    "oracle-pool-min": ("one", _RESPONSES),
    "oracle-pool-max": ("one", _RESPONSES),
    "oracle-pool-timeout-secs": ("one", _RESPONSES),
    "postgres-db-url": ("one", _RESPONSES),
    "postgres-pool-max": ("one", _RESPONSES),
    "redis-url": ("one", _RESPONSES),
    "redis-pool-max": ("one", _RESPONSES),
    "redis-retention-days": ("one", _RESPONSES),
}

REFUSED_FLAGS: dict[str, str] = {
    "worker-urls": (
        "this router serves PD-disaggregated clusters: list workers with --prefill URL "
        "[BOOTSTRAP_PORT] and --decode URL"
    )
}
"""Flags that change what is served: ignoring them would be worse than stopping."""

NEAREST_POLICY: dict[str, Policy] = {
    "cache_aware": "sbs",
    "manual": "session",
    "bucket": "least_tokens",
}
"""Its policies without a twin here."""
WHY_NEAREST: dict[str, str] = {
    "cache_aware": "it places requests by what each DP rank has cached, and holds them",
    "manual": "a conversation (x-smg-routing-key) stays on one DP rank",
    "bucket": "it balances by tokens",
}
