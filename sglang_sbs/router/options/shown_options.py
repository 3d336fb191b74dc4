"""Which features a router's flags turn on, as ``GET /server_info`` tells (``sbs_options``). For the
doctor's table of features. Never a key, a path or an address."""

from __future__ import annotations

from typing import Any

from sglang_sbs.router.options.router_options import RouterOptions


def shown_options(options: RouterOptions) -> dict[str, Any]:
    """Fields are only ever added: a doctor may be of another release than the router."""
    return {
        "policy": options.scheduler.policy,
        "trigger": options.scheduler.trigger,
        "role": options.role,
        "front_ends": options.workers,
        "endforward": options.endforward_bind is not None,
        "endforward_encrypted": options.endforward_keys is not None,
        "gang_gate": options.relay.sends_gangs,
        "prefix_source": options.prefix_source,
        "tokenizer": options.tokenizer_path is not None,
        "forward_token_ids": options.forward_token_ids,
        "low_priority_values_first": options.relay.low_priority_values_first,
        "tenants": options.tenant_header is not None,
        "admin_key": options.worker_key is not None,
        "service_discovery": options.discovery is not None,
    }
