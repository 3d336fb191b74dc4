"""What an engine says about itself in ``GET /server_info``, by any version of SGLang, and whether
it can be used at all.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sglang_sbs.router.engine_secrets import text_without_secrets
from sglang_sbs.router.engines.urls import rank_url
from sglang_sbs.router.workers.rank_contract import is_coupled, rank_choice_of
from sglang_sbs.scheduling.events import InstanceRole, RankChoice
from sglang_sbs.wire.endforward import MAX_DP_SIZE

_FIRST_REBOOTSTRAP = (0, 5, 16)
_FIRST_CONVERTED = (0, 5, 22)
MIN_VERSION = (0, 5, 6)
"""First SGLang release this router knows how to speak to."""

PLUGIN_VERSION = (0, 5, 11)
"""First SGLang release that loads plugins."""
CACHED_DETAILS_VERSION = (0, 5, 23)
"""First SGLang release known to take ``return_cached_tokens_details``."""
DEFERRED_RELEASE = {
    "mooncake": (0, 5, 21),
    "mooncake_tcp": (0, 5, 21),
    "nixl": (0, 5, 21),
    "mori": (0, 5, 22),
}
"""First SGLang release that defers the release of KV by default, by transfer back end."""
_FIRST_LORA_REFUSAL = (0, 5, 10)
"""First SGLang release known to refuse an adapter without ``--enable-lora``, not to ignore it."""
_REPLAY_PORT = "replay_endpoint_port_base"
_RUST_MARK = "rust_mm_transport"
"""In an internal state: SGLang's Rust server, also where it does not name the DP rank (0.5.22)."""
_MAX_TEXT = 256
_MAX_ROUTERS = 16
_MAX_COUNT = 1 << 40
_MAX_GRAPHS = 256
_MAX_TIMEOUT_S = 3600
_BIGRAM_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
NO_DP_ATTENTION, SKIPS_GATHER = "no DP attention", "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
_REPLICAS = (
    "its DP ranks are independent replicas, so batching them into one forward pass gains nothing"
)


class UnusableWorker(ValueError):
    """The engine answers, but requests must not be routed to it."""


class RankOutOfReach(UnusableWorker):
    """Its DP ranks serve HTTP themselves, and requests for some of them would go astray."""


class SbsBlock(msgspec.Struct, frozen=True):
    """What our engine plugin adds to ``/server_info``."""

    boot_id: str = ""
    booted_s: int = 0
    """When it started, by the clock of its host, since 1970; 0: an older plugin does not say."""
    bind: str = ""
    """Where DP rank 0 listens (``tcp://HOST:PORT``; rank d at ``PORT + d``), in bind mode."""
    routers: tuple[str, ...] = ()
    """Endpoints the engine's publishers connect to."""
    barrier: bool | None = None
    """Whether its DP ranks gather before each pass; None: an older plugin does not say."""
    deferred_release: bool | None = None
    """SGLang's ``SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE`` there; False also where the
    release has none. None: an older plugin does not say."""
    transfer_timeout_s: int = 0
    """Mooncake's limit on one transfer there (``MC_TRANSFER_TIMEOUT``); 0: its own, 30 s."""


class KvEventsBlock(msgspec.Struct, frozen=True, kw_only=True):
    """What SGLang (>= 0.5.14) says of its KV events: rank d publishes at ``port + d``."""

    port: int
    replay_port: int | None = None
    """Rank d answers at ``replay_port + d``; ``None``: lost events cannot be had again."""
    topic: str = ""
    block_tokens: int = 1
    host: str = ""
    """As the engine names it, for people; the worker's own host is connected to."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits are per DP rank, 0 where the engine does not say."""

    dp_size: int = 1
    nodes: int = 1
    """Hosts that its DP ranks are laid over, in order of rank; the first has the HTTP server."""
    dist_init_addr: str = ""
    """``--dist-init-addr``, by which its nodes find each other; empty on one node."""
    chunk_tokens: int = 0
    max_prefill_tokens: int = 0
    kv_capacity_tokens: int = 0
    max_running_requests: int = 0
    prefill_max_requests: int = 0
    """In one pass; 0: no limit."""
    captured_tokens: tuple[int, ...] = ()
    """Token counts of its prefill CUDA graphs, ascending; empty without graphs."""
    page_size: int = 1
    """Tokens per KV block; under decode context parallelism several pages make one."""
    bigram: bool = False
    """The KV cache is keyed by pairs of tokens (EAGLE)."""
    cached_details: bool = False
    """OpenAI endpoints say what was cached when asked (``return_cached_tokens_details``)."""
    completion_template: bool = False
    """The prompt of ``/v1/completions`` becomes part of another one."""
    max_request_tokens: int = 0
    """The longest prompt it takes."""
    cuts_prompts: bool = False
    """It cuts longer ones instead of refusing them."""
    context_tokens: int = 0
    """``--context-length``: prompt and output together; 0: the model's, which it does not say."""
    refused_fields: tuple[str, ...] = ()
    """Fields of a request that it answers with 400, by its flags."""
    version: str = ""
    model_id: str = ""
    bootstrap_port: int | None = None
    load_balance_method: str = ""
    coupled: bool = False
    """Its release couples prefill and decode ranks (``rank_contract``)."""
    rank_choice: RankChoice = "free"
    """What can be chosen of its ranks as a decode instance."""
    defers_release: bool = False
    """A decode instance that keeps the KV pages of an aborted request until nothing is written to
    them any more (SGLang's deferred release)."""
    acks_release: bool = False
    """A prefill instance that tells such a decode instance when nothing is written any more;
    without, decode keeps the pages for 30 s."""
    transfer_backend: str = ""
    allocates_late: bool = False
    """A decode instance that reserves KV when prefill is done with it, not before."""
    sbs: SbsBlock | None = None
    """``None``: the plugin is not installed or not configured there."""
    radix_cache: bool = True
    """Prompts find what earlier ones left in the KV cache."""
    kv_events: KvEventsBlock | None = None
    """``None``: what the cache holds is not published, or not so that it can be subscribed to."""
    warnings: tuple[str, ...] = ()
    overlap: bool = True
    """Overlap scheduling, SGLang's default."""
    no_barrier: str = ""
    """Why its DP ranks make passes each for itself; empty: they make them together."""
    elastic: bool = False
    """DP ranks may join and leave while it runs (``--elastic-ep-backend``)."""
    rust_server: bool = False
    """Every DP rank serves HTTP itself, and only for itself (``SGLANG_RUST_SERVER=1``)."""
    node_hosts: tuple[str, ...] = ()
    """With the Rust server: where its nodes but the first are; empty: not known."""

    @property
    def boot_id(self) -> str:
        """Empty: the engine does not say."""
        return self.sbs.boot_id if self.sbs is not None else ""

    @property
    def ranks(self) -> str:
        count = f"{self.dp_size} rank{'s' if self.dp_size > 1 else ''}"
        return f"{count}, no barrier ({self.no_barrier})" if self.no_barrier else count


def node_of_rank(info: WorkerInfo, dp_rank: int) -> int:
    """``--node-rank`` of the process that speaks for a DP rank (``read_placement``)."""
    return dp_rank * info.nodes // info.dp_size


def server_url(url: str, info: WorkerInfo, dp_rank: int) -> str:
    if not info.rust_server:
        return url
    node = node_of_rank(info, dp_rank)
    number = dp_rank * info.nodes % info.dp_size // info.nodes
    return rank_url(url, number, info.node_hosts[node - 1] if node else "")


def ranks_in_reach(info: WorkerInfo) -> range:
    """DP ranks of which the address is known: all, or those of the first node."""
    if not info.rust_server or info.node_hosts:
        return range(info.dp_size)
    return range(sum(node_of_rank(info, rank) == 0 for rank in range(info.dp_size)))


def parse_version(text: str) -> tuple[int, ...] | None:
    """``(0, 5, 23)`` of ``0.5.23rc1``; ``None`` if the text is no release number."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else None


# SGLang fault: retraction-without-key
def may_rebootstrap(version: str) -> bool:
    """Whether a decode engine that retracts a request may have prefill compute its KV again
    (SGLang's ``submit_prefill_recompute``)."""
    numbers = parse_version(version) or ()
    return not numbers > (0, 0, 0) or numbers >= _FIRST_REBOOTSTRAP


def takes_converted(version: str) -> bool:
    """Whether ``/v1/messages`` and ``/v1/responses`` work over PD; a development build counts as
    new. SGLang takes the PD routing fields in ``/v1/messages`` from then on."""
    numbers = parse_version(version) or ()
    return not numbers > (0, 0, 0) or numbers >= _FIRST_CONVERTED


def parse_server_info(data: dict[str, Any], role: InstanceRole) -> WorkerInfo:
    """Read ``/server_info``.
    Raises: UnusableWorker, too old, or launched in another disaggregation mode than ``role``."""
    version = _text(data.get("version"))
    numbers = parse_version(version)
    _check_usable(data, role, version, numbers)
    rust_server = _check_rust_server(data, rank=0)
    dp_size, _ = dp_ranks(data)
    sbs = _sbs_block(data.get("sbs"))
    no_barrier = _why_no_barrier(data, dp_size, sbs)
    most_tokens, warnings = _count(data.get("max_prefill_tokens")), list[str]()
    if no_barrier == NO_DP_ATTENTION:
        warnings.append(f"dp_size is {dp_size} without DP attention: {_REPLICAS}")
    method = _text(data.get("load_balance_method"))
    choice = rank_choice_of(numbers, method) if role == "decode" else "free"
    if choice == "engine" and dp_size > 1:
        warnings.append(_why_engine(version, method, numbers))
    allocation = data.get("disaggregation_decode_allocation_policy")
    kv_events = _kv_events_block(data.get("kv_events"), dp_size, warnings)
    cuts = data.get("allow_auto_truncate") is True
    return WorkerInfo(
        dp_size=dp_size,
        nodes=_nodes(data),
        dist_init_addr=_text(data.get("dist_init_addr")) if _count(data.get("nnodes")) > 1 else "",
        # Without chunking a rank takes whole prompts up to this per pass.
        chunk_tokens=_count(data.get("chunked_prefill_size")) or most_tokens,
        max_prefill_tokens=most_tokens,
        kv_capacity_tokens=_count(data.get("max_total_num_tokens")),
        max_running_requests=_max_running_requests(data, dp_size),
        prefill_max_requests=_count(data.get("prefill_max_requests")),
        captured_tokens=_captured_tokens(data.get("cuda_graph_config")),
        page_size=kv_events.block_tokens if kv_events else max(1, _count(data.get("page_size"))),
        bigram=str(data.get("speculative_algorithm")).upper() in _BIGRAM_ALGORITHMS,
        # The Rust server passes over the field, and no answer would read as nothing cached.
        cached_details=(numbers or ()) >= CACHED_DETAILS_VERSION and not rust_server,
        completion_template=bool(data.get("completion_template")),
        # Refused from ``max_req_input_len`` on, or cut to it (``validate_input_length``).
        max_request_tokens=max(0, _count(data.get("max_req_input_len")) - (not cuts)),
        cuts_prompts=cuts,
        context_tokens=_count(data.get("context_length")),
        refused_fields=() if rust_server else _refused_fields(data, numbers or ()),
        version=version,
        model_id=_text(data.get("served_model_name") or data.get("model_path")),
        bootstrap_port=_count(data.get("disaggregation_bootstrap_port")) or None,
        load_balance_method=method,
        coupled=is_coupled(numbers),
        rank_choice=choice,
        defers_release=role == "decode" and _defers_release(data, numbers or (), sbs),
        acks_release=role == "prefill" and _defers_release(data, numbers or (), sbs),
        transfer_backend=_text(data.get("disaggregation_transfer_backend")),
        allocates_late=role == "decode" and allocation == "prefill_complete",
        overlap=data.get("disable_overlap_schedule") is not True,
        elastic=_text(data.get("elastic_ep_backend")) not in ("", "none"),
        rust_server=rust_server,
        sbs=sbs,
        no_barrier=no_barrier,
        radix_cache=_has_radix_cache(data, role),
        kv_events=kv_events,
        warnings=tuple(text[: 2 * _MAX_TEXT] for text in warnings),
    )


def _check_usable(
    data: dict[str, Any], role: InstanceRole, version: str, numbers: tuple[int, ...] | None
) -> None:
    # Builds from source call themselves 0.0.0: they are given the benefit of the doubt.
    if numbers is not None and (0, 0, 0) < numbers < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise UnusableWorker(
            f"runs SGLang {version}; this router speaks to SGLang {wanted} and later. Upgrade the "
            "engine, to 0.5.10 or later if you can: before, prefill and decode DP ranks cannot be "
            "chosen independently"
        )
    mode = data.get("disaggregation_mode")
    if isinstance(mode, str) and mode not in ("", role):
        raise UnusableWorker(
            f"runs with --disaggregation-mode {_text(mode)} but is given to the router as "
            f"--{role}. Relaunch it with --disaggregation-mode {role} or list it under the other "
            "flag"
        )


def dp_ranks(data: dict[str, Any]) -> tuple[int, bool | None]:
    """How many DP ranks ``/server_info`` tells of, and whether they are by attention; ``None``:
    it does not say. Up to SGLang 0.5.21 ``dp_size`` counts both kinds and ``enable_dp_attention``
    tells them apart. From 0.5.22 on ``attn_dp_size`` counts those by attention and ``dp_size``
    replicas; the other field is there for old clients and will be dropped.
    Raises: UnusableWorker, nobody has so many."""
    attn_dp_size, old = _count(data.get("attn_dp_size")), data.get("enable_dp_attention")
    dp_size = max(1, attn_dp_size if attn_dp_size > 1 else _count(data.get("dp_size")))
    if dp_size > MAX_DP_SIZE:
        raise UnusableWorker(f"/server_info says dp_size {dp_size}, which cannot be")
    if dp_size > 1 and (attn_dp_size > 1 or old is True):
        return dp_size, True
    return dp_size, False if attn_dp_size or old is False else None


def _refused_fields(data: dict[str, Any], numbers: tuple[int, ...]) -> tuple[str, ...]:
    """``_tokenize_one_request``, ``_validate_one_request`` and ``_validate_and_resolve_lora`` of
    SGLang's ``managers/tokenizer_manager.py``."""
    lacks = {
        # Decode engines have no radix cache unless told to, so often only prefill refuses these.
        "input_embeds": data.get("disable_radix_cache") is False,
        "custom_logit_processor": data.get("enable_custom_logit_processor") is False,
        "return_hidden_states": data.get("enable_return_hidden_states") is False
        and data.get("return_hidden_states_mode") is None,
        "lora_path": numbers >= _FIRST_LORA_REFUSAL
        and data.get("enable_lora", ...) in (None, False),
    }
    return tuple(name for name, is_lacking in lacks.items() if is_lacking)


def _has_radix_cache(data: dict[str, Any], role: InstanceRole) -> bool:
    """SGLang's decode engines keep none unless told to."""
    if data.get("disable_radix_cache") is True:
        return False
    return role == "prefill" or data.get("disaggregation_decode_enable_radix_cache") is True


def _why_no_barrier(data: dict[str, Any], dp_size: int, sbs: SbsBlock | None) -> str:
    """SGLang: ``prepare_mlp_sync_batch_raw`` of ``managers/scheduler_components/dp_attn.py``."""
    if dp_size == 1:
        return ""
    if _count(data.get("dwdp_size")) > 1:
        return f"--dwdp-size {_count(data.get('dwdp_size'))}"
    if sbs is not None and sbs.barrier is False:
        return SKIPS_GATHER
    return NO_DP_ATTENTION if dp_ranks(data)[1] is False else ""


def _nodes(data: dict[str, Any]) -> int:
    """Of the first pipeline stage, which speaks; stages are laid over nodes first
    (``managers/data_parallel_controller.py``, ``launch_tensor_parallel_group``). Without DP
    attention the ranks are replicas, and taken to be on one."""
    if not dp_ranks(data)[1]:
        return 1
    nodes = _count(data.get("nnodes")) // max(1, _count(data.get("pp_size")))
    return min(max(1, nodes), MAX_DP_SIZE)


def not_a_rank(url: str, rank: int, why: str) -> str:
    return (
        f"DP rank {rank} does not serve at {url}: {why}. With SGLANG_RUST_SERVER=1 every rank "
        "serves HTTP at the engine's --port plus its number: open those ports to the router, or "
        "start the engine without SGLANG_RUST_SERVER"
    )


def not_heard(rank: int, node: int, url: str) -> str:
    """What to tell of a DP rank of the worker at ``url`` that is on an unknown other node."""
    return (
        f"DP rank {rank} serves HTTP on node {node} (SGLANG_RUST_SERVER=1), and nothing says where "
        "that is: only EndForward that was sent with a key is believed to, and none is heard. Set "
        f"SGLANG_SBS_ROUTERS, SGLANG_SBS_INSTANCE_ID={url} and SGLANG_SBS_ENDFORWARD_KEY_FILE on "
        "each node, and --sbs-endforward-key-file here, or start the engine without "
        "SGLANG_RUST_SERVER"
    )


def check_rank_server(data: dict[str, Any], rank: int, boot_id: str) -> None:
    """Whether what answered at the address of ``rank`` is that DP rank, of the engine ``boot_id``.
    Raises: RankOutOfReach, it is not."""
    if not _check_rust_server(data, rank):
        raise RankOutOfReach("what answers is no DP rank of an engine with SGLANG_RUST_SERVER=1")
    sbs = _sbs_block(data.get("sbs"))
    if sbs is not None and boot_id and sbs.boot_id != boot_id:
        raise RankOutOfReach("another engine answers")


def _check_rust_server(data: dict[str, Any], rank: int) -> bool:
    """Whether SGLang's Rust server wrote this ``/server_info``: it alone names the DP rank that
    answers (``deployment_info``, ``srt/rust_server/config.py``). Raises: RankOutOfReach, it answers
    for another rank than ``rank``, or does not say of how many."""
    told = data.get("deployment_info")
    if not isinstance(told, dict) or "dp_rank" not in told:
        states = data.get("internal_states")
        if isinstance(states, list) and any(_RUST_MARK in s for s in states if isinstance(s, dict)):
            raise RankOutOfReach(
                "it serves with SGLANG_RUST_SERVER=1 and does not say how many DP ranks it has. "
                "Upgrade it to SGLang 0.5.23 or later, or start it without SGLANG_RUST_SERVER"
            )
        return False
    if _count(told["dp_rank"]) != rank:
        raise RankOutOfReach(
            f"DP rank {_count(told['dp_rank'])} of an instance serves here (SGLANG_RUST_SERVER=1), "
            f"not rank {rank}. Give the router the address of rank 0, which is the engine's "
            "--port, once: it finds the other ranks at the ports behind it"
        )
    return True


def _why_engine(version: str, method: str, numbers: tuple[int, ...] | None) -> str:
    wanted = "follow_bootstrap_room" if numbers and numbers >= (0, 5, 8) else "round_robin"
    return (
        f"SGLang {version} with --load-balance-method {method} chooses decode DP ranks itself. "
        f"Relaunch it with --load-balance-method {wanted}, and the router chooses among those that "
        "go with the prefill rank; from SGLang 0.5.10 on, among all"
    )


def _max_running_requests(data: dict[str, Any], dp_size: int) -> int:
    """Per rank: what the schedulers resolved if they say so, else the launch flag divided."""
    states = data.get("internal_states")
    if isinstance(states, list) and states and isinstance(states[0], dict):
        for name in ("effective_max_running_requests_per_dp", "max_running_requests_per_dp"):
            if resolved := _count(states[0].get(name)):
                return resolved
    return _count(data.get("max_running_requests")) // dp_size


def _captured_tokens(config: object) -> tuple[int, ...]:
    """``cuda_graph_config`` (SGLang's ``model_executor/cuda_graph_config.py``) of the prefill
    phase, whose ``bs`` are token counts."""
    prefill = config.get("prefill") if isinstance(config, dict) else None
    sizes = prefill.get("bs") if isinstance(prefill, dict) else None
    if not isinstance(sizes, list) or not prefill or prefill.get("backend") in (None, "disabled"):
        return ()
    return tuple(sorted({*map(_count, sizes[:_MAX_GRAPHS])} - {0}))


def _sbs_block(value: object) -> SbsBlock | None:
    if not isinstance(value, dict):
        return None
    routers = value.get("routers")
    return SbsBlock(
        boot_id=_text(value.get("boot_id")),
        booted_s=_count(value.get("booted_s")),
        bind=_text(value.get("bind")),
        routers=tuple(map(_text, routers[:_MAX_ROUTERS])) if isinstance(routers, list) else (),
        barrier=_flag(value.get("barrier")),
        deferred_release=_flag(value.get("deferred_release")),
        transfer_timeout_s=min(_count(value.get("transfer_timeout_s")), _MAX_TIMEOUT_S),
    )


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _defers_release(data: dict[str, Any], numbers: tuple[int, ...], sbs: SbsBlock | None) -> bool:
    variable = sbs.deferred_release if sbs is not None else None
    first = DEFERRED_RELEASE.get(_text(data.get("disaggregation_transfer_backend")) or "mooncake")
    if first is None or variable is False:
        return False
    is_release = numbers > (0, 0, 0)
    return numbers >= first if is_release else variable is True


def _kv_events_block(value: object, dp_size: int, warnings: list[str]) -> KvEventsBlock | None:
    """SGLang's ``describe_kv_events_publisher``; what cannot be used becomes a warning."""
    if not isinstance(value, dict) or value.get("publisher") != "zmq":
        return None
    port, replay_port = _count(value.get("endpoint_port_base")), value.get(_REPLAY_PORT)
    block_tokens, ranks = _count(value.get("block_size")), _count(value.get("dp_size")) or dp_size
    if not _is_port_range(port, dp_size) or block_tokens < 1 or ranks != dp_size:
        warnings.append(
            f"its KV events cannot be subscribed to: port {port}, block_size {block_tokens}, "
            f"dp_size {ranks} where the engine has {dp_size}"
        )
        return None
    replay = _count(replay_port)
    apart = _is_port_range(replay, dp_size) and abs(replay - port) >= dp_size
    if replay_port is not None and not apart:
        warnings.append(
            f"lost KV events cannot be had again: its replay ports from {replay_port} on are "
            f"those of its KV events or none; let replay_endpoint in --kv-events-config begin at "
            f"port {port + dp_size} or later"
        )
        replay = 0
    topic, host = _text(value.get("topic")), _text(value.get("endpoint_host"))
    return KvEventsBlock(
        port=port, replay_port=replay or None, topic=topic, block_tokens=block_tokens, host=host
    )


def _is_port_range(first: int, ports: int) -> bool:
    return first >= 1 and first + ports - 1 <= 65535


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return min(max(0, value), _MAX_COUNT)


def _text(value: object) -> str:
    """No longer than anybody writes it, as it goes to every front end once a second, and without
    secrets, as pages, logs and metrics show it."""
    if not isinstance(value, str):
        return ""
    return text_without_secrets(value[: 4 * _MAX_TEXT])[:_MAX_TEXT]
