"""Plans the exact processes of a PD cluster on one machine. Pure: starts nothing, opens no socket,
reads no environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sglang_sbs.cluster.dp_ranks import DpRanks, EngineFlagError, dp_ranks, int_flag
from sglang_sbs.cluster.flag_words import text_flag, without_given
from sglang_sbs.cluster.keys import ADMIN_FLAG, API_FLAG, VARIABLES, Keys, keys_of_router

# Ports of one instance, as offsets into its block. Under DP attention SGLang derives more from
# dist-init: six for its own processes (`PortArgs`) and, DP_ATTENTION_HANDSHAKE_PORT_DELTA = 13 on,
# a ZeroMQ socket that is open for a moment while the DP controller starts. HTTP that reaches it
# aborts the controller, so it must not be a port that anyone polls.
HTTP_OFFSET, BOOTSTRAP_OFFSET, NCCL_OFFSET, DIST_INIT_OFFSET = range(4)
DERIVED_FROM_DIST_INIT = (1, 2, 3, 4, 5, 6, 13)
PORTS_PER_INSTANCE = 32
# Of up to `_KV_EVENTS_RANKS` DP ranks, then of their replays. More take two further blocks.
KV_EVENTS_OFFSET = 18
_KV_EVENTS_RANKS = 7
MIN_KV_EVENTS_PAGE_SIZE = 8
"""Smallest page size of engines with KV events. Naming and publishing smaller pages costs engines
more than it saves."""
_KV_EVENTS_BUFFER_STEPS = 2000

BIND_FLAG = "--sbs-endforward-bind"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}
"""Wildcard addresses, which can be listened on but not connected to, and this machine's."""
ROUTERS_ENV = "SGLANG_SBS_ROUTERS"
RUST_SERVER_ENV = "SGLANG_RUST_SERVER"
"""SGLang's switch for its Rust server: each DP rank then serves HTTP itself, at the instance's port
+ its rank."""
HEALTH_PASS_ENV = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
"""SGLang's variable for whether `/health` runs a forward pass on an idle engine."""

_TLS = (
    "the router uses plain HTTP to engines, which listen on this machine only. HTTPS for clients "
    "is --router-tls-cert-path and --router-tls-key-path"
)
_GRPC = "the router uses HTTP to engines, each at its own port. Leave it out"
_KEY_FILE = "SGLang has no such flag. Write {}; the router gets the same key"
# Flags that this planner writes, and flags with which the router could not reach an engine.
_PLANNED_FLAGS = {
    "--host": "the engines' address is planned; --host of this command is the router's",
    "--port": "the engines' ports are planned; --port of this command is the router's",
    "--disaggregation-mode": "use --prefill-instances and --decode-instances",
    "--disaggregation-bootstrap-port": "bootstrap ports are planned",
    "--nccl-port": "leave it out: ports are planned",
    "--dist-init-addr": "leave it out: all instances are on this machine",
    "--nnodes": "leave it out: all instances are on this machine",
    "--node-rank": "leave it out: all instances are on this machine",
    "--config": "write the engine's flags on the command line",
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--ssl-keyfile-password": _TLS,
    "--enable-ssl-refresh": _TLS,
    "--grpc-mode": _GRPC,
    "--smg-grpc-mode": _GRPC,
    "--grpc-port": _GRPC,
    "--api-key-file": _KEY_FILE.format(API_FLAG),
    "--admin-api-key-file": _KEY_FILE.format(ADMIN_FLAG),
}
_DECODE_CACHE = "--disaggregation-decode-enable-radix-cache"
_BASE_GPU = "--base-gpu-id"
_MODEL_FLAGS = ("--model-path", "--model")


class PlanError(ValueError):
    """The options do not allow a cluster."""


class Role(StrEnum):
    """Role of an instance; a unified one has both and needs no router."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class CpuEngines(Protocol):
    """Engines on CPU, available only in a checkout (`tools.cpu_engine.engines`)."""

    def environment(self, processes: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return additional variables for an engine with this many scheduler processes."""

    def flags(self, role: Role, ranks: int) -> list[str]:
        """Return default flags for an engine with this many DP ranks."""

    async def forker(self, environment: Mapping[str, str], log_path: Path) -> Any:
        """Start the process from which engines are forked (`spawn.Forker`)."""


@dataclass(frozen=True)
class ClusterOptions:
    """The user's options. Flags are SGLang's, passed verbatim to every engine or to those of one
    role. `environment` is the environment in which engines start."""

    model_path: str
    prefill_instances: int = 1
    decode_instances: int = 1
    unified_instances: int = 0
    prefill_nodes: int = 1
    """``--nnodes`` of each prefill instance; node k is this machine at 127.0.0.(1 + k)."""
    engine_flags: Sequence[str] = ()
    prefill_flags: Sequence[str] = ()
    decode_flags: Sequence[str] = ()
    cpu: CpuEngines | None = None
    log_dir: Path = Path()
    environment: Mapping[str, str] = field(default_factory=dict)
    with_router: bool = True
    router_flags: Sequence[str] = ()
    router_tokenizer: str | None = None
    """Tokenizer of the router; ``None``: the model's; empty: it estimates lengths."""
    router_keys: Keys | None = None
    """Keys that the router reads from its flags, files or environment; ``None``: only from
    flags."""
    router_host: str = "127.0.0.1"
    router_port: int | None = None

    def flags_of(self, role: Role) -> list[str]:
        """Flags passed to every engine and to those of `role`."""
        return [*self.engine_flags, *self._own_flags(role)]

    def has_own(self, role: Role, flag: str) -> bool:
        """Whether `flag` is given to the engines of `role` only."""
        return any(word.partition("=")[0] == flag for word in self._own_flags(role))

    def _own_flags(self, role: Role) -> Sequence[str]:
        own = {Role.PREFILL: self.prefill_flags, Role.DECODE: self.decode_flags}
        return own.get(role, ())


@dataclass(frozen=True)
class ProcessPlan:
    """One process to start. `argv[0]` is the interpreter; `environment` is complete."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log_path: Path


@dataclass(frozen=True)
class ServerPlan(ProcessPlan):
    """A process that serves HTTP at `url`."""

    url: str


@dataclass(frozen=True)
class InstancePlan(ServerPlan):
    """One SGLang instance. `ranks` is the number of its DP ranks; `rank_servers` that of its HTTP
    servers, at `url` and the ports behind it."""

    role: Role
    bootstrap_port: int | None
    ranks: int
    rank_servers: int = 1
    keys: Keys = field(default_factory=Keys)
    followers: tuple[ProcessPlan, ...] = ()
    """Processes of the instance on its other nodes, in order. These serve HTTP only if each DP rank
    does."""

    @property
    def server_urls(self) -> tuple[str, ...]:
        """URL of every HTTP server of the instance: one, or one per DP rank."""
        port = int(self.url.rpartition(":")[2])
        here = self.rank_servers // (1 + len(self.followers)) or 1
        return tuple(
            f"http://{_node_host(rank // here)}:{port + rank % here}"
            for rank in range(self.rank_servers)
        )


@dataclass(frozen=True)
class ClusterPlan:
    """All processes of a cluster. Engines on CPU are forked from one process."""

    instances: tuple[InstancePlan, ...]
    router: ServerPlan | None
    cpu: CpuEngines | None
    environment: Mapping[str, str]
    """Environment of the process from which CPU engines are forked."""
    log_dir: Path

    @property
    def servers(self) -> tuple[ServerPlan, ...]:
        """Every server, the router last."""
        return self.instances if self.router is None else (*self.instances, self.router)

    def of_role(self, role: Role) -> tuple[InstancePlan, ...]:
        return tuple(instance for instance in self.instances if instance.role is role)


def plan_cluster(options: ClusterOptions, port_blocks: Iterator[int]) -> ClusterPlan:
    """Plan every process. `port_blocks` yields first ports of disjoint free blocks of
    `PORTS_PER_INSTANCE`. Raises: PlanError, which names the flag and what to write instead."""
    try:
        return _Planner(options, port_blocks).plan()
    except EngineFlagError as error:
        raise PlanError(str(error)) from None


class _Planner:
    def __init__(self, options: ClusterOptions, port_blocks: Iterator[int]) -> None:
        self._ranks = {role: dp_ranks(options.flags_of(role)) for role in Role}
        _check(options, self._ranks)
        self._keys = {role: Keys.of_flags(options.flags_of(role)) for role in Role}
        self._gpus = {role: _gpus(options.flags_of(role)) for role in Role}
        self._options = options
        self._port_blocks = port_blocks
        self._environment = dict(options.environment)
        # Of this process, where SGLang has loaded plugins.
        self._environment.pop("SGLANG_SBS_BOOT_ID", None)
        if options.cpu is not None:
            self._environment |= options.cpu.environment(
                max(self._gpus.values()), self._environment
            )
        self._router_block = next(port_blocks) if options.with_router else None

    def plan(self) -> ClusterPlan:
        options = self._options
        names = [(Role.PREFILL, n) for n in range(options.prefill_instances)]
        names += [(Role.DECODE, n) for n in range(options.decode_instances)]
        names += [(Role.UNIFIED, n) for n in range(options.unified_instances)]
        first_gpus = accumulate((self._gpus[role] for role, _ in names), initial=0)
        instances = tuple(
            # A role with a --base-gpu-id of its own begins there.
            self._instance(
                role,
                f"{role}-{number}",
                number * self._gpus[role] if options.has_own(role, _BASE_GPU) else first_gpu,
            )
            for (role, number), first_gpu in zip(names, first_gpus, strict=False)
        )
        first = self._router_block
        return ClusterPlan(
            instances=instances,
            router=None if first is None else _plan_router(options, instances, first),
            cpu=options.cpu,
            environment=self._environment,
            log_dir=options.log_dir,
        )

    def _instance(self, role: Role, name: str, first_gpu: int) -> InstancePlan:
        options, first = self._options, next(self._port_blocks)
        # A unified instance is queried directly.
        rust_server = uses_rust_server(self._environment) and role is not Role.UNIFIED
        # Its listeners take a port per rank, and the bootstrap registry is on the first of them.
        http = next(self._port_blocks) if rust_server else first + HTTP_OFFSET
        bootstrap = http if rust_server else first + BOOTSTRAP_OFFSET
        ports = _Ports(first, http, bootstrap, self._kv_events_ports(role, first))
        url = f"http://{_node_host(0)}:{http}"
        nodes: list[ProcessPlan] = []
        for node in range(self._nodes(role)):
            called = f"{name}-node-{node}" if node else name
            environment = self._environment_of(role, url)
            if node:  # all nodes are this machine, so without it they would look like the first
                environment["SGLANG_SBS_NODE_HOST"] = _node_host(node)
            argv = self._argv(role, ports, node, first_gpu)
            nodes.append(ProcessPlan(called, argv, environment, options.log_dir / f"{called}.log"))
        return InstancePlan(
            **vars(nodes[0]),
            followers=tuple(nodes[1:]),
            role=role,
            url=url,
            keys=self._keys[role],
            bootstrap_port=bootstrap if role is Role.PREFILL else None,
            ranks=self._ranks[role].count,
            rank_servers=self._ranks[role].count if rust_server else 1,
        )

    def _environment_of(self, role: Role, url: str) -> dict[str, str]:
        """Return the environment of the processes of the instance at ``url``."""
        environment = dict(self._environment)
        if role is Role.UNIFIED:
            environment.pop(RUST_SERVER_ENV, None)
        elif role is Role.PREFILL and uses_rust_server(environment):
            environment.setdefault(HEALTH_PASS_ENV, "0")  # decode asks every 5 s
        if self._router_block is not None:
            # Those of the user get reports as well: sglang-sbs observe, or a router elsewhere.
            others = environment.pop(ROUTERS_ENV, "")
            own = _endforward_target(self._options.router_flags, self._router_block)
            if endpoints := ",".join(filter(None, (own, others))):
                environment[ROUTERS_ENV] = endpoints
            environment["SGLANG_SBS_INSTANCE_ID"] = url
            if key_file := text_flag(self._options.router_flags, "--sbs-endforward-key-file"):
                environment["SGLANG_SBS_ENDFORWARD_KEY_FILE"] = key_file
        return environment

    def _nodes(self, role: Role) -> int:
        return self._options.prefill_nodes if role is Role.PREFILL else 1

    def _argv(self, role: Role, ports: _Ports, node: int, first_gpu: int) -> tuple[str, ...]:
        options, nodes = self._options, self._nodes(role)
        host, first_gpu = _node_host(node), first_gpu + node * (self._gpus[role] // nodes)
        given, ranks = options.flags_of(role), self._ranks[role]
        planned = ["--model-path", options.model_path, "--host", host, "--port", str(ports.http)]
        if nodes > 1:
            planned += ["--nnodes", str(nodes), "--node-rank", str(node)]
        # Without DP attention each rank is a separate engine, for which SGLang finds ports.
        if ranks.replicas == 1:
            planned += ["--nccl-port", str(ports.first + NCCL_OFFSET)]
            planned += ["--dist-init-addr", f"127.0.0.1:{ports.first + DIST_INIT_OFFSET}"]
        if role is not Role.UNIFIED:
            planned += ["--disaggregation-mode", str(role)]
        if role is Role.PREFILL:
            planned += ["--disaggregation-bootstrap-port", str(ports.bootstrap)]
        if options.cpu is not None:
            planned += without_given(options.cpu.flags(role, ranks.count), given)
        elif first_gpu or _BASE_GPU in given:
            step = int_flag(given, "--gpu-id-step")
            base = int_flag(given, _BASE_GPU, default=0)
            given = without_given(given, [_BASE_GPU])
            planned += [_BASE_GPU, str(base + first_gpu * step)]
        events = _kv_events_flags(host, ports.kv_events)
        return (sys.executable, "-m", "sglang.launch_server", *planned, *given, *events)

    def _kv_events_ports(self, role: Role, first_port: int) -> tuple[int, int] | None:
        """Return two ports: rank d publishes at the first + d, and answers replays at the second +
        d. None: the instance publishes no KV events."""
        ranks = self._ranks[role].count
        if ranks > PORTS_PER_INSTANCE or not _wants_kv_events(self._options, role):
            return None
        if ranks > _KV_EVENTS_RANKS:
            return next(self._port_blocks), next(self._port_blocks)
        events = first_port + KV_EVENTS_OFFSET
        return events, events + _KV_EVENTS_RANKS


def _endforward_endpoint(router_block: int) -> str:
    return f"tcp://127.0.0.1:{router_block + 1}"


def _endforward_target(router_flags: Sequence[str], router_block: int) -> str:
    """Return the endpoint by which engines reach the router; empty: it takes no messages."""
    bound = text_flag(router_flags, BIND_FLAG) or _endforward_endpoint(router_block)
    if bound.lower() == "none":
        return ""
    host, colon, port = bound.removeprefix("tcp://").rpartition(":")
    return f"tcp://{_LOOPBACK[host]}{colon}{port}" if host in _LOOPBACK else bound


def _tensor_parallel(flags: Sequence[str]) -> int:
    return int_flag(flags, "--tp", "--tp-size", "--tensor-parallel-size")


def _gpus(flags: Sequence[str]) -> int:
    """Return the number of GPUs of an instance with these flags."""
    pipeline_parallel = int_flag(flags, "--pp", "--pp-size", "--pipeline-parallel-size")
    return _tensor_parallel(flags) * pipeline_parallel * dp_ranks(flags).replicas


def _check(options: ClusterOptions, ranks_of: Mapping[Role, DpRanks]) -> None:
    for flag, count in (
        ("--prefill-instances", options.prefill_instances),
        ("--decode-instances", options.decode_instances),
    ):
        if count < 0 or (count == 0 and options.unified_instances == 0):
            raise PlanError(f"{flag} must be at least 1, got {count}")
    nodes, processes = options.prefill_nodes, _tensor_parallel(options.flags_of(Role.PREFILL))
    if nodes < 1 or processes % nodes:
        raise PlanError(f"prefill_nodes is {nodes}: --tp {processes} must be a multiple of it")
    for flags in (options.engine_flags, options.prefill_flags, options.decode_flags):
        for word in flags:
            flag = word.partition("=")[0]
            if flag in _PLANNED_FLAGS:
                raise PlanError(f"{flag} cannot be passed to the engines: {_PLANNED_FLAGS[flag]}")
            if flag in _MODEL_FLAGS and flags is not options.engine_flags:
                raise PlanError(f"{flag} cannot differ between prefill and decode")
    if not uses_rust_server(options.environment):
        return
    if (ranks := ranks_of[Role.PREFILL].count) % nodes:
        raise PlanError(
            f"{nodes} nodes and {RUST_SERVER_ENV}=1: {ranks} DP ranks must be a multiple of that"
        )
    if (ranks := max(each.count for each in ranks_of.values())) > PORTS_PER_INSTANCE:
        raise PlanError(
            f"{ranks} DP ranks with {RUST_SERVER_ENV}=1 need a port each, and an instance has "
            f"{PORTS_PER_INSTANCE} here: unset {RUST_SERVER_ENV}"
        )


class _Ports(NamedTuple):
    """First ports of one instance: of its block, of the HTTP servers (rank 0's), of the KV
    registry, of KV events and of their replays."""

    first: int
    http: int
    bootstrap: int
    kv_events: tuple[int, int] | None


def uses_rust_server(environment: Mapping[str, str]) -> bool:
    """Whether engines started with `environment` serve HTTP from every DP rank."""
    return environment.get(RUST_SERVER_ENV, "").lower() in ("true", "1", "yes", "y")


def _wants_kv_events(options: ClusterOptions, role: Role) -> bool:
    """Return whether a router of this cluster would use KV events of the role, and its engines can
    publish them."""
    given = options.flags_of(role)
    names = {word.partition("=")[0] for word in given}
    return (
        (role is Role.PREFILL or (role is Role.DECODE and _DECODE_CACHE in names))
        and options.with_router
        and text_flag(options.router_flags, "--sbs-prefix-source") in ("", "auto", "events")
        and not names & {"--disable-radix-cache", "--kv-events-config"}
        and int_flag(given, "--page-size") >= MIN_KV_EVENTS_PAGE_SIZE
    )


def _kv_events_flags(host: str, ports: tuple[int, int] | None) -> tuple[str, ...]:
    if ports is None:
        return ()
    events, replay = ports
    config = {
        "publisher": "zmq",
        "endpoint": f"tcp://{host}:{events}",
        # SGLang treats an address without a wildcard as one to connect to.
        "bind": True,
        "replay_endpoint": f"tcp://{host}:{replay}",
        "buffer_steps": _KV_EVENTS_BUFFER_STEPS,
    }
    return ("--kv-events-config", json.dumps(config))


def _node_host(node: int) -> str:
    """Return the address of a node: all of 127/8 is this machine, so each node gets a separate
    one."""
    return f"127.0.0.{1 + node}"


def pd_urls(instances: Sequence[InstancePlan]) -> tuple[list[tuple[str, int | None]], list[str]]:
    """Return the URLs for a router: prefill instances with bootstrap ports, and decode
    instances."""
    prefill = [(plan.url, plan.bootstrap_port) for plan in instances if plan.role is Role.PREFILL]
    return prefill, [plan.url for plan in instances if plan.role is Role.DECODE]


def router_argv(
    prefill: Iterable[tuple[str, int | None]],
    decode: Iterable[str],
    module: str = "sglang_sbs.launch_router",
) -> list[str]:
    """Return the argv of a router for engines at these URLs (prefill with bootstrap port); further
    router flags can be appended."""
    argv = [sys.executable, "-m", module, "--pd-disaggregation"]
    for url, bootstrap_port in prefill:
        argv += ["--prefill", url, *([] if bootstrap_port is None else [str(bootstrap_port)])]
    for url in decode:
        argv += ["--decode", url]
    return argv


def _plan_router(
    options: ClusterOptions, instances: Sequence[InstancePlan], block: int
) -> ServerPlan:
    port = block if options.router_port is None else options.router_port
    argv = router_argv(*pd_urls(instances))
    argv += ["--host", options.router_host, "--port", str(port)]
    named = options.router_tokenizer
    tokenizer = options.model_path if named is None else named
    defaults = ["--tokenizer-path", tokenizer] if tokenizer else []
    defaults += [BIND_FLAG, _endforward_endpoint(block)]
    argv += without_given(defaults, options.router_flags)
    argv += options.router_flags
    given = options.router_keys or Keys.of_flags(options.router_flags)
    keys = keys_of_router((plan.keys for plan in instances if plan.role is not Role.UNIFIED), given)
    environment = dict(options.environment)
    if keys.api and not given.api:
        environment[VARIABLES[API_FLAG]] = keys.api
    if keys.admin and not given.admin:
        environment[VARIABLES[ADMIN_FLAG]] = keys.admin
    scheme = "https" if text_flag(options.router_flags, "--tls-cert-path") else "http"
    host = _LOOPBACK.get(options.router_host, options.router_host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return ServerPlan(
        name="router",
        argv=tuple(argv),
        environment=environment,
        log_path=options.log_dir / "router.log",
        url=f"{scheme}://{host}:{port}",
    )
