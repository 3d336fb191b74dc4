"""Parses ``GET /server_info`` of any supported SGLang release, and decides whether the engine is
usable."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sglang_sbs.router.engine_secrets import text_without_secrets
from sglang_sbs.router.engines.urls import rank_url
from sglang_sbs.router.workers.rank_contract import is_coupled
from sglang_sbs.scheduling.events import InstanceRole
from sglang_sbs.wire.endforward import MAX_DP_SIZE

_FIRST_REBOOTSTRAP = (0, 5, 16)
_FIRST_CONVERTED = (0, 5, 22)
MIN_VERSION = (0, 5, 6)
"""First SGLang release that this router supports."""

PLUGIN_VERSION = (0, 5, 11)
"""First SGLang release that loads plugins."""
CACHED_DETAILS_VERSION = (0, 5, 23)
"""First SGLang release known to accept ``return_cached_tokens_details``."""
DEFERRED_RELEASE = {
    "mooncake": (0, 5, 21),
    "mooncake_tcp": (0, 5, 21),
    "nixl": (0, 5, 21),
    "mori": (0, 5, 22),
}
"""First SGLang release that defers the release of KV by default, by transfer backend."""
_FIRST_LORA_REFUSAL = (0, 5, 10)
"""First SGLang release known to refuse an adapter without ``--enable-lora``; earlier ones ignore
it."""
_REPLAY_PORT = "replay_endpoint_port_base"
_RUST_MARK = "rust_mm_transport"
"""Key in ``internal_states`` that only SGLang's Rust server has; identifies it in 0.5.22, where
``/server_info`` has no DP rank."""
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
_CHOOSES_RANKS = "chooses decode DP ranks itself; from 0.5.10 on the router does"


class UnusableWorker(ValueError):
    """The engine responds, but requests must not be routed to it."""


class RankOutOfReach(UnusableWorker):
    """DP ranks have their own HTTP servers, and some of them cannot be reached."""


class SbsBlock(msgspec.Struct, frozen=True):
    """Fields that our engine plugin adds to ``/server_info``."""

    boot_id: str = ""
    booted_s: int = 0
    """Start time by the host's clock, Unix seconds; 0: an older plugin does not report it."""
    bind: str = ""
    """Endpoint of DP rank 0 (``tcp://HOST:PORT``; rank d at ``PORT + d``) in bind mode."""
    routers: tuple[str, ...] = ()
    """Endpoints that the engine's publishers connect to."""
    barrier: bool | None = None
    """Whether its DP ranks gather before each pass; None: an older plugin does not report it."""
    deferred_release: bool | None = None
    """SGLang's ``SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE``, False if the release lacks it.
    None: an older plugin does not report it."""
    transfer_timeout_s: int = 0
    """Mooncake's limit on one transfer (``MC_TRANSFER_TIMEOUT``) in s; 0: its default, 30 s."""


class KvEventsBlock(msgspec.Struct, frozen=True, kw_only=True):
    """KV event settings of SGLang (>= 0.5.14): rank d publishes at ``port + d``."""

    port: int
    replay_port: int | None = None
    """Rank d replays at ``replay_port + d``; ``None``: lost events cannot be requested again."""
    topic: str = ""
    block_tokens: int = 1
    host: str = ""
    """Host named by the engine, for display; the router connects to the worker's own host."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine. Limits are per DP rank, 0 if unknown."""

    dp_size: int = 1
    nodes: int = 1
    """Hosts that its DP ranks are spread over, in order of rank; the first has the HTTP server."""
    dist_init_addr: str = ""
    """``--dist-init-addr``, the meeting point of its nodes; empty on one node."""
    chunk_tokens: int = 0
    max_prefill_tokens: int = 0
    kv_capacity_tokens: int = 0
    max_running_requests: int = 0
    prefill_max_requests: int = 0
    """Largest number of requests in one pass; 0: no limit."""
    captured_tokens: tuple[int, ...] = ()
    """Token counts of its prefill CUDA graphs, ascending; empty without graphs."""
    page_size: int = 1
    """Tokens per KV block; several pages under decode context parallelism."""
    bigram: bool = False
    """The KV cache is keyed by pairs of tokens (EAGLE)."""
    cached_details: bool = False
    """OpenAI endpoints report cached tokens on request (``return_cached_tokens_details``)."""
    completion_template: bool = False
    """``/v1/completions`` puts the prompt into a template."""
    max_request_tokens: int = 0
    """Longest prompt that the engine takes, in tokens; 0 if unknown."""
    cuts_prompts: bool = False
    """Prompts longer than ``max_request_tokens`` are truncated instead of refused."""
    context_tokens: int = 0
    """``--context-length``, prompt and output together; 0: the model's, which is not reported."""
    refused_fields: tuple[str, ...] = ()
    """Request fields that its flags make it answer with 400."""
    version: str = ""
    model_id: str = ""
    bootstrap_port: int | None = None
    load_balance_method: str = ""
    coupled: bool = False
    """Its release couples prefill and decode ranks (``rank_contract``)."""
    defers_release: bool = False
    """A decode instance that keeps an aborted request's KV pages until no more can be written to
    them (SGLang's deferred release)."""
    acks_release: bool = False
    """A prefill instance that notifies a decode instance with deferred release of the last KV
    write; without it decode keeps an aborted request's pages for 30 s."""
    transfer_backend: str = ""
    allocates_late: bool = False
    """A decode instance that reserves KV only after prefill is done."""
    sbs: SbsBlock | None = None
    """Fields of our engine plugin; ``None``: it is not installed or not configured."""
    radix_cache: bool = True
    """Prompts reuse KV that earlier ones left in the cache."""
    kv_events: KvEventsBlock | None = None
    """Where KV events are published; ``None``: nowhere, or they cannot be subscribed to."""
    warnings: tuple[str, ...] = ()
    overlap: bool = True
    """Scheduling overlaps the forward pass, SGLang's default."""
    no_barrier: str = ""
    """Why its DP ranks run passes independently; empty: they run them together."""
    elastic: bool = False
    """DP ranks may join and leave at runtime (``--elastic-ep-backend``)."""
    rust_server: bool = False
    """Every DP rank has its own HTTP server (``SGLANG_RUST_SERVER=1``)."""
    node_hosts: tuple[str, ...] = ()
    """Hosts of the nodes after the first, with the Rust server; empty if unknown."""

    @property
    def boot_id(self) -> str:
        """Boot id of the engine process; empty if no plugin reports it."""
        return self.sbs.boot_id if self.sbs is not None else ""

    @property
    def ranks(self) -> str:
        count = f"{self.dp_size} rank{'s' if self.dp_size > 1 else ''}"
        return f"{count}, no barrier ({self.no_barrier})" if self.no_barrier else count


def node_of_rank(info: WorkerInfo, dp_rank: int) -> int:
    """Return the ``--node-rank`` of the process that sends EndForward for a DP rank."""
    return dp_rank * info.nodes // info.dp_size


def server_url(url: str, info: WorkerInfo, dp_rank: int) -> str:
    if not info.rust_server:
        return url
    node = node_of_rank(info, dp_rank)
    number = dp_rank * info.nodes % info.dp_size // info.nodes
    return rank_url(url, number, info.node_hosts[node - 1] if node else "")


def ranks_in_reach(info: WorkerInfo) -> range:
    """Return the DP ranks with a known address: all, or those of the first node."""
    if not info.rust_server or info.node_hosts:
        return range(info.dp_size)
    return range(sum(node_of_rank(info, rank) == 0 for rank in range(info.dp_size)))


def parse_version(text: str) -> tuple[int, ...] | None:
    """Return ``(0, 5, 23)`` for ``0.5.23rc1``; ``None`` if the text is not a release number."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else None


# SGLang fault: retraction-without-key
def may_rebootstrap(version: str) -> bool:
    """Return whether a decode engine may ask prefill to recompute KV after a retraction (SGLang's
    ``submit_prefill_recompute``, from 0.5.16 on). Development builds count as new."""
    numbers = parse_version(version) or ()
    return not numbers > (0, 0, 0) or numbers >= _FIRST_REBOOTSTRAP


def takes_converted(version: str) -> bool:
    """Return whether ``/v1/messages`` and ``/v1/responses`` work under PD: SGLang accepts the PD
    routing fields there from 0.5.22 on. Development builds count as new."""
    numbers = parse_version(version) or ()
    return not numbers > (0, 0, 0) or numbers >= _FIRST_CONVERTED


def parse_server_info(data: dict[str, Any], role: InstanceRole) -> WorkerInfo:
    """Parse ``/server_info``.
    Raises: UnusableWorker, it is too old or not launched in the disaggregation mode ``role``."""
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
    if is_coupled(numbers) and role == "decode" and dp_size > 1:
        warnings.append(f"SGLang {version} {_CHOOSES_RANKS}")
    allocation = data.get("disaggregation_decode_allocation_policy")
    kv_events = _kv_events_block(data.get("kv_events"), dp_size, warnings)
    cuts = data.get("allow_auto_truncate") is True
    return WorkerInfo(
        dp_size=dp_size,
        nodes=_nodes(data),
        dist_init_addr=_text(data.get("dist_init_addr")) if _count(data.get("nnodes")) > 1 else "",
        # Without chunking a rank processes whole prompts up to this size per pass.
        chunk_tokens=_count(data.get("chunked_prefill_size")) or most_tokens,
        max_prefill_tokens=most_tokens,
        kv_capacity_tokens=_count(data.get("max_total_num_tokens")),
        max_running_requests=_max_running_requests(data, dp_size),
        prefill_max_requests=_count(data.get("prefill_max_requests")),
        captured_tokens=_captured_tokens(data.get("cuda_graph_config")),
        page_size=kv_events.block_tokens if kv_events else max(1, _count(data.get("page_size"))),
        bigram=str(data.get("speculative_algorithm")).upper() in _BIGRAM_ALGORITHMS,
        # The Rust server ignores the field, and its silence would read as nothing cached.
        cached_details=(numbers or ()) >= CACHED_DETAILS_VERSION and not rust_server,
        completion_template=bool(data.get("completion_template")),
        # ``validate_input_length`` refuses or truncates prompts from ``max_req_input_len`` on.
        max_request_tokens=max(0, _count(data.get("max_req_input_len")) - (not cuts)),
        cuts_prompts=cuts,
        context_tokens=_count(data.get("context_length")),
        refused_fields=() if rust_server else _refused_fields(data, numbers or ()),
        version=version,
        model_id=_text(data.get("served_model_name") or data.get("model_path")),
        bootstrap_port=_count(data.get("disaggregation_bootstrap_port")) or None,
        load_balance_method=_text(data.get("load_balance_method")),
        coupled=is_coupled(numbers),
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
    # Builds from source report 0.0.0 and are accepted.
    if numbers is not None and (0, 0, 0) < numbers < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise UnusableWorker(
            f"runs SGLang {version}; this router supports SGLang {wanted} and later. Upgrade the "
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
    """Return the number of DP ranks and whether they use DP attention (``None`` if unknown). Up to
    SGLang 0.5.21 ``dp_size`` counts both kinds and ``enable_dp_attention`` distinguishes them. From
    0.5.22 on ``attn_dp_size`` counts ranks with DP attention and ``dp_size`` counts replicas; the
    other field is kept for old clients and will be dropped.
    Raises: UnusableWorker, the number is impossible."""
    attn_dp_size, old = _count(data.get("attn_dp_size")), data.get("enable_dp_attention")
    dp_size = max(1, attn_dp_size if attn_dp_size > 1 else _count(data.get("dp_size")))
    if dp_size > MAX_DP_SIZE:
        raise UnusableWorker(f"/server_info has dp_size {dp_size}, more than {MAX_DP_SIZE}")
    if dp_size > 1 and (attn_dp_size > 1 or old is True):
        return dp_size, True
    return dp_size, False if attn_dp_size or old is False else None


def _refused_fields(data: dict[str, Any], numbers: tuple[int, ...]) -> tuple[str, ...]:
    """Return the fields refused by ``_tokenize_one_request``, ``_validate_one_request`` and
    ``_validate_and_resolve_lora`` in SGLang's ``managers/tokenizer_manager.py``."""
    lacks = {
        # Decode engines have no radix cache by default, so usually only prefill refuses these.
        "input_embeds": data.get("disable_radix_cache") is False,
        "custom_logit_processor": data.get("enable_custom_logit_processor") is False,
        "return_hidden_states": data.get("enable_return_hidden_states") is False
        and data.get("return_hidden_states_mode") is None,
        "lora_path": numbers >= _FIRST_LORA_REFUSAL
        and data.get("enable_lora", ...) in (None, False),
    }
    return tuple(name for name, is_lacking in lacks.items() if is_lacking)


def _has_radix_cache(data: dict[str, Any], role: InstanceRole) -> bool:
    """Return whether prefixes are cached; SGLang's decode engines do so only on request."""
    if data.get("disable_radix_cache") is True:
        return False
    return role == "prefill" or data.get("disaggregation_decode_enable_radix_cache") is True


def _why_no_barrier(data: dict[str, Any], dp_size: int, sbs: SbsBlock | None) -> str:
    """Return why ranks are not synchronized (SGLang's ``prepare_mlp_sync_batch_raw`` in
    ``managers/scheduler_components/dp_attn.py``); empty if they are."""
    if dp_size == 1:
        return ""
    if _count(data.get("dwdp_size")) > 1:
        return f"--dwdp-size {_count(data.get('dwdp_size'))}"
    if sbs is not None and sbs.barrier is False:
        return SKIPS_GATHER
    return NO_DP_ATTENTION if dp_ranks(data)[1] is False else ""


def _nodes(data: dict[str, Any]) -> int:
    """Return the number of nodes of the first pipeline stage, whose DP ranks send EndForward.
    Stages are spread over nodes first (``managers/data_parallel_controller.py``,
    ``launch_tensor_parallel_group``). Without DP attention the ranks are replicas, assumed to be on
    one node."""
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


def unknown_address(rank: int, node: int, url: str) -> str:
    """Describe a DP rank of the worker at ``url`` on another node with an unknown address."""
    return (
        f"DP rank {rank} serves HTTP on node {node} (SGLANG_RUST_SERVER=1), whose address is "
        "unknown: only EndForward sent with a key can report it, and none arrives. Set "
        f"SGLANG_SBS_ROUTERS, SGLANG_SBS_INSTANCE_ID={url} and SGLANG_SBS_ENDFORWARD_KEY_FILE on "
        "each node, and --sbs-endforward-key-file here, or start the engine without "
        "SGLANG_RUST_SERVER"
    )


def check_rank_server(data: dict[str, Any], rank: int, boot_id: str) -> None:
    """Check that the server at the address of ``rank`` is that DP rank, of the engine ``boot_id``.
    Raises: RankOutOfReach, it is not."""
    if not _check_rust_server(data, rank):
        raise RankOutOfReach(
            "the server there is not a DP rank of an engine with SGLANG_RUST_SERVER=1"
        )
    sbs = _sbs_block(data.get("sbs"))
    if sbs is not None and boot_id and sbs.boot_id != boot_id:
        raise RankOutOfReach("another engine answers")


def _check_rust_server(data: dict[str, Any], rank: int) -> bool:
    """Return whether SGLang's Rust server wrote this ``/server_info``: only it includes the DP rank
    that responds (``deployment_info``, ``srt/rust_server/config.py``). Raises: RankOutOfReach, it
    is another rank than ``rank``, or the number of ranks is missing."""
    deployment = data.get("deployment_info")
    if not isinstance(deployment, dict) or "dp_rank" not in deployment:
        states = data.get("internal_states")
        if isinstance(states, list) and any(_RUST_MARK in s for s in states if isinstance(s, dict)):
            raise RankOutOfReach(
                "it serves with SGLANG_RUST_SERVER=1 and does not report its number of DP ranks. "
                "Upgrade it to SGLang 0.5.23 or later, or start it without SGLANG_RUST_SERVER"
            )
        return False
    if _count(deployment["dp_rank"]) != rank:
        raise RankOutOfReach(
            f"DP rank {_count(deployment['dp_rank'])} of an instance serves here "
            f"(SGLANG_RUST_SERVER=1), not rank {rank}. Give the router the address of rank 0, "
            "which is the engine's --port, once: it finds the other ranks at the ports behind it"
        )
    return True


def _max_running_requests(data: dict[str, Any], dp_size: int) -> int:
    """Return the limit per rank: the schedulers' value if reported, else the launch flag
    divided."""
    states = data.get("internal_states")
    if isinstance(states, list) and states and isinstance(states[0], dict):
        for name in ("effective_max_running_requests_per_dp", "max_running_requests_per_dp"):
            if resolved := _count(states[0].get(name)):
                return resolved
    return _count(data.get("max_running_requests")) // dp_size


def _captured_tokens(config: object) -> tuple[int, ...]:
    """Return the token counts of prefill's CUDA graphs, ascending (``prefill.bs`` in SGLang's
    ``model_executor/cuda_graph_config.py``); empty without graphs."""
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
    """Parse SGLang's ``describe_kv_events_publisher``. Return ``None`` if no KV events are
    published, or if they cannot be used, which is added to ``warnings``."""
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
            f"lost KV events cannot be requested again: its replay ports from {replay_port} on "
            "overlap those of its KV events or are invalid; set replay_endpoint in "
            f"--kv-events-config to port {port + dp_size} or higher"
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
    """Return a text without secrets, as pages, logs and metrics show it, and bounded, as it goes to
    every front end once a second."""
    if not isinstance(value, str):
        return ""
    return text_without_secrets(value[: 4 * _MAX_TEXT])[:_MAX_TEXT]
