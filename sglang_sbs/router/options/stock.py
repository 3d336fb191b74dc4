"""Flags and policies of ``sglang_router.launch_router`` 0.3.2 that have no effect here. Each is
accepted with one warning about what is lost."""

from __future__ import annotations

from sglang_sbs.router.options.option import Option, switch
from sglang_sbs.scheduling.policy_registry import Policy

_WHY = {
    "caches are not approximated here: sbs tracks what each DP rank holds": (
        "cache-threshold balance-abs-threshold balance-rel-threshold bucket-adjust-interval-secs "
        "eviction-interval-secs max-tree-size max-idle-secs assignment-mode"
    ),
    "prefill and decode are chosen together, by --policy": "prefill-policy decode-policy",
    "DP ranks are always chosen here": "dp-aware",
    "this router serves the one model of its workers": "enable-igw",
    "there is only one router here, and it is for production": "mini-lb",
    "workers are prefill or decode here: --prefill-selector and --decode-selector": "selector",
    "token counting needs --tokenizer-path": "model-path",
    "token counts are not cached here": (
        "tokenizer-cache-enable-l0 tokenizer-cache-l0-max-entries "
        "tokenizer-cache-enable-l1 tokenizer-cache-l1-max-memory"
    ),
    "set it on the engines, which parse responses": "reasoning-parser tool-call-parser",
    "workers are SGLang engines": "backend",
    "no responses or conversations are stored here": (
        "mcp-config-path history-backend oracle-wallet-path oracle-tns-alias "
        "oracle-connect-descriptor oracle-username oracle-password oracle-pool-min oracle-pool-max "
        "oracle-pool-timeout-secs postgres-db-url postgres-pool-max redis-url redis-pool-max "
        "redis-retention-days"
    ),
}
_SWITCHES = (
    *("dp-aware", "enable-igw", "mini-lb"),
    *("tokenizer-cache-enable-l0", "tokenizer-cache-enable-l1"),
)

IGNORED_FLAGS = {name: why for why, names in _WHY.items() for name in names.split()}

IGNORED_OPTIONS = tuple(
    Option(
        name, "", switch if name in _SWITCHES else str, nargs="*" if name == "selector" else None
    )
    for name in IGNORED_FLAGS
)

REFUSED_FLAGS: dict[str, str] = {
    "worker-urls": (
        "this router serves PD-disaggregated clusters: list workers with --prefill URL "
        "[BOOTSTRAP_PORT] and --decode URL"
    )
}
"""Why a flag of ``sglang_router`` is rejected, by flag: ignoring it would change what is served."""

NEAREST_POLICY: dict[str, tuple[Policy, str]] = {
    "cache_aware": ("sbs", "it places requests by what each DP rank has cached, and holds them"),
    "manual": ("session", "a conversation (x-smg-routing-key) stays on one DP rank"),
    "bucket": ("least_tokens", "it balances by tokens"),
}
"""Closest policy of this router, and the reason, for each policy of ``sglang_router`` that it
lacks."""
