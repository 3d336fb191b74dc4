"""Possible defects of a cluster of mock engines, each as a change of the healthy one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from doctor_rig import DP, Rig

from sglang_sbs.doctor.findings import CLUSTER, ROUTER, Finding
from tools.stand_ins.ports import free_ports

Break = Callable[[Rig], Awaitable[None] | None]

KV_EVENTS = {"publisher": "zmq", "topic": "", "block_size": 16, "dp_size": DP}


def ids(findings: list[Finding], subject: str | None = None) -> set[str]:
    return {finding.id for finding in findings if subject in (None, finding.subject)}


def says(**fields: object) -> Break:
    """The first prefill engine's ``/server_info``."""
    return lambda r: r.prefill[0].info.update(fields)


def decode_says(**fields: object) -> Break:
    return lambda r: r.decode.info.update(fields)


def sbs_says(**fields: object) -> Break:
    return lambda r: r.prefill[0].sbs.update(fields)


def decode_sbs_says(**fields: object) -> Break:
    return lambda r: r.decode.sbs.update(fields)


def flags(*words: str) -> Break:
    return lambda r: r.flags.extend(words)


def unseen_plugin(r: Rig) -> None:
    """Make the engines report like SGLang 0.5.20, which has plugins and does not show them."""
    for engine in r.engines:
        engine.info |= {"version": "0.5.20", "sbs": None}


def silent(r: Rig) -> None:
    r.prefill[0].speaks = []


def publishes_kv(r: Rig, **fields: object) -> None:
    for engine in r.prefill:
        port, replay = free_ports(DP)[0], free_ports(DP)[0]
        for first in (port, replay):
            for rank in range(DP):
                r.listen_at(first + rank)
        engine.info["kv_events"] = (
            KV_EVENTS | {"endpoint_port_base": port, "replay_endpoint_port_base": replay} | fields
        )


def publishes_no_replay(r: Rig) -> None:
    publishes_kv(r, replay_endpoint_port_base=None)


def publishes_small_pages(r: Rig) -> None:
    publishes_kv(r, block_size=1)


def publishes_at_closed_ports(r: Rig) -> None:
    port = free_ports(DP)[0]
    publishes_kv(r, endpoint_port_base=port)


def lies_over_two_nodes(r: Rig) -> None:
    """The second rank of the first prefill engine is on another node."""
    publishes_kv(r)
    r.prefill[0].info["nnodes"] = 2


def publishes_unusably(r: Rig) -> None:
    publishes_kv(r, endpoint_port_base=0)


def publishes_on_one(r: Rig) -> None:
    publishes_kv(r)
    del r.prefill[1].info["kv_events"]


def taken_port(r: Rig) -> None:
    """Listen at the EndForward port like another router; the engines' release hides the plugin."""
    unseen_plugin(r)
    port = free_ports(1)[0]
    r.listen_at(port)
    r.flags += ["--sbs-endforward-bind", f"tcp://127.0.0.1:{port}"]


def wants_key(key: str) -> Break:
    def set_key(r: Rig) -> None:
        for engine in r.engines:
            engine.api_key = key

    return set_key


def router_worker(**fields: object) -> Break:
    """The router's entry of the first prefill engine."""
    return lambda r: r.serve_router()[0].update(fields)


def router_lacks(r: Rig) -> None:
    del r.serve_router()[0]


def router_has_more(r: Rig) -> None:
    workers = r.serve_router()
    workers.append(workers[0] | {"url": "http://192.0.2.9:1"})


def router_is_foreign(r: Rig) -> None:
    for worker in r.serve_router():
        del worker["endforward_messages"]


def router_answers(path: str, status: int) -> Break:
    def change(r: Rig) -> None:
        r.serve_router()
        r.router.answers[path] = (status, {})

    return change


def router_state(key: str, value: object) -> Break:
    def change(r: Rig) -> None:
        r.serve_router()
        r.router_state()[key] = value

    return change


def router_is_alone(r: Rig) -> None:
    """One of several front ends, which lost the scheduler and goes by the fallback."""
    r.serve_router()
    r.router_state()["policy"] = "least_tokens"
    link = {"address": "tcp://10.0.0.1:7700", "connected": False, "term": 3, "losses": 1}
    r.router.answers["/workers"][1]["scheduler"] = link


def router_age(age_s: float | None) -> Break:
    def change(r: Rig) -> None:
        r.serve_router()
        r.router_state()["prefill"][0]["ranks"][1]["age_s"] = age_s

    return change


async def router_gone(r: Rig) -> None:
    r.serve_router()
    await r.router.stop()


async def decode_gone(r: Rig) -> None:
    await r.decode.stop()


def freeze(r: Rig) -> None:
    r.decode.freeze()
    r.flags += ["--timeout", "0.5"]


def given_instead(url: Callable[[Rig], str]) -> Break:
    """Another URL where the decode engine's should be."""
    return lambda r: r.urls.update({r.decode.url: url(r)})


def swapped_bootstraps(r: Rig) -> None:
    """Both engines are behind each other's port, as with two on one host and one default."""
    for engine in r.prefill:
        engine.info["disaggregation_bootstrap_port"] = None
    r.bootstrap_ports.reverse()


def bootstrap(status: int, body: object) -> Break:
    return lambda r: r.bootstraps[0].answers.update({"/route": (status, body)})


async def bootstrap_gone(r: Rig) -> None:
    await r.bootstraps[0].stop()


def slow(seconds: float, every: int) -> Break:
    def change(r: Rig) -> None:
        r.prefill[0].slow_s, r.prefill[0].slow_every = seconds, every

    return change


P0, P1, D0 = "prefill 0", "prefill 1", "decode"
ONE_SLOT = [{"effective_max_running_requests_per_dp": 1}] * DP

BROKEN: dict[str, tuple[str, Break]] = {
    "reach.unreachable": (D0, decode_gone),
    "reach.no-pair": (CLUSTER, decode_gone),
    "reach.silent": (D0, freeze),
    "reach.wrong-role": (D0, decode_says(disaggregation_mode="prefill")),
    "reach.unusable": (D0, decode_says(attn_dp_size=100_000)),
    "reach.rank-server": (P0, says(deployment_info={"dp_rank": 1, "dp_size": DP})),
    "reach.not-ready": (D0, lambda r: setattr(r.decode, "ready_status", 503)),
    "reach.is-a-router": (D0, decode_says(router_manager=True)),
    "reach.same-engine": (
        CLUSTER,
        lambda r: r.prefill[1].sbs.update(boot_id=r.prefill[0].boot_id),
    ),
    "version.too-old": (P0, says(version="0.4.9")),
    "version.needs-patch": (P0, says(version="0.5.8", sbs=None)),
    "version.kv-release": (D0, decode_says(version="0.5.20")),
    "version.kv-acks": (CLUSTER, says(version="0.5.20")),
    "version.coupled": (P0, says(version="0.5.8")),
    "version.mixed": (CLUSTER, says(version="0.5.22")),
    "version.mixed-plugin": (CLUSTER, sbs_says(sglang_sbs_version="9.0")),
    "version.wire": (CLUSTER, sbs_says(wire_version=2)),
    "version.mixed-kernel": (CLUSTER, sbs_says(sgl_kernel_version="0.1")),
    "version.unknown": (P0, says(version="0.0.0")),
    "plugin.absent": (P0, lambda r: (silent(r), r.prefill[0].info.update(sbs=None))[1]),
    "plugin.unknown": (P0, taken_port),
    "plugin.routers-differ": (CLUSTER, sbs_says(routers=["tcp://127.0.0.1:1"])),
    "plugin.instance-id": (
        P0,
        lambda r: [e.sbs.update(instance_id="http://p:1") for e in r.prefill] and None,
    ),
    "plugin.instance-id-unknown": (P0, sbs_says(instance_id="http://elsewhere:1")),
    "plugin.errors": (P0, lambda r: r.prefill[0].says.update(hook_errors=3)),
    "endforward.silent": (P0, silent),
    "endforward.rank-missing": (P0, lambda r: r.prefill[0].speaks.remove(1)),
    "endforward.stale": (P0, router_age(30.0)),
    "endforward.key": (P0, sbs_says(encrypted=True)),
    "endforward.mismatch": (P0, lambda r: r.prefill[0].says.update(role="decode")),
    "endforward.malformed": (CLUSTER, Rig.publish_garbage),
    "endforward.stranger": (CLUSTER, Rig.speak_as_stranger),
    "endforward.unattributed": (
        CLUSTER,
        lambda r: (unseen_plugin(r), r.flags.extend(["--sbs-endforward-bind", r.endpoint]))[0],
    ),
    "endforward.port-busy": (CLUSTER, taken_port),
    "endforward.elsewhere": (
        P0,
        lambda r: (silent(r), r.prefill[0].sbs.update(routers=["tcp://192.0.2.1:7600"]))[0],
    ),
    "endforward.cannot-listen": (CLUSTER, sbs_says(routers=["tcp://nowhere.invalid:7600"])),
    "limits.dp-one": (P0, says(attn_dp_size=1)),
    "limits.no-dp-attention": (
        P0,
        says(attn_dp_size=1, dp_size=DP, enable_dp_attention=False),
    ),
    "limits.elastic": (P0, says(elastic_ep_backend="mooncake")),
    "limits.no-barrier": (P0, sbs_says(barrier=False)),
    "limits.no-chunking": (P0, says(chunked_prefill_size=-1)),
    "limits.chunk-small": (P0, says(chunked_prefill_size=128)),
    "limits.chunk-page": (P0, says(chunked_prefill_size=1000)),
    "limits.max-prefill-tokens": (P0, says(max_prefill_tokens=600)),
    "limits.few-running": (P0, says(internal_states=ONE_SLOT)),
    "limits.uneven": (CLUSTER, says(chunked_prefill_size=2048)),
    "flags.load-balance": (P0, says(load_balance_method="round_robin")),
    "flags.prefill-delayer": (P0, says(enable_prefill_delayer=True)),
    "flags.prefill-delayer-queue": (P0, says(prefill_delayer_queue_min_ratio=0.3)),
    "flags.min-free-slots-delay": (P0, says(min_free_slots_delay=4)),
    "flags.sleep-on-idle": (P0, says(sleep_on_idle=True)),
    "flags.overlap-disabled": (P0, says(disable_overlap_schedule=True)),
    "flags.schedule-policy": (P0, says(schedule_policy="lpm")),
    "flags.pipeline": (P0, says(pp_size=2)),
    "flags.kv-release": (D0, decode_sbs_says(deferred_release=False)),
    "flags.abort-on-priority": (P0, says(abort_on_priority_when_disabled=True)),
    "pair.model": (CLUSTER, says(served_model_name="another")),
    "pair.transfer-backend": (CLUSTER, says(disaggregation_transfer_backend="nixl")),
    "pair.page-size": (CLUSTER, decode_says(page_size=64)),
    "pair.kv-dtype": (
        CLUSTER,
        lambda r: (
            [e.info.update(kv_cache_dtype="fp8_e4m3") for e in r.prefill],
            r.decode.info.update(kv_cache_dtype="bfloat16"),
        )[1],
    ),
    "pair.allocation-policy": (
        CLUSTER,
        decode_says(disaggregation_decode_allocation_policy="prefill_complete"),
    ),
    "pair.tp-indivisible": (
        CLUSTER,
        lambda r: (
            [e.info.update(tp_size=n) for e, n in zip(r.engines, (4, 4, 6), strict=True)] and None
        ),
    ),
    "pair.tp-differs": (CLUSTER, decode_says(tp_size=8)),
    "pair.retraction-key": (CLUSTER, lambda r: (wants_key("k")(r), flags("--api-key", "k")(r))[1]),
    "pair.cache-report": (CLUSTER, says(enable_cache_report=True)),
    "pair.context": (CLUSTER, decode_says(max_req_input_len=4096)),
    "latency.high": (P0, slow(0.06, 1)),
    "latency.jitter": (P0, slow(0.15, 4)),
    "latency.clock": (P0, lambda r: setattr(r.prefill[0], "clock_s", 30.0)),
    "bootstrap.unreachable": (P0, bootstrap_gone),
    "bootstrap.wrong-port": (P0, says(disaggregation_bootstrap_port=8998)),
    "bootstrap.not-one": (P0, bootstrap(200, {"hello": "world"})),
    "bootstrap.registering": (P0, bootstrap(503, "not fully registered yet")),
    "bootstrap.other-engine": (P0, swapped_bootstraps),
    "cache.off": (P0, says(disable_radix_cache=True)),
    "cache.unusable": (P0, publishes_unusably),
    "cache.unreachable": (P0, publishes_at_closed_ports),
    "cache.other-nodes": (P0, lies_over_two_nodes),
    "cache.no-replay": (P0, publishes_no_replay),
    "cache.small-pages": (P0, publishes_small_pages),
    "cache.mixed": (CLUSTER, publishes_on_one),
    "room.kv-full": (D0, decode_says(max_total_num_tokens=105)),
    "room.slots-full": (D0, decode_says(internal_states=ONE_SLOT)),
    "room.unknown": (D0, lambda r: setattr(r.decode, "loads", False)),
    "security.key-refused": (P0, wants_key("secret")),
    "security.key-unneeded": (P0, flags("--api-key", "secret")),
    "security.admin-key": (P0, says(admin_api_key="admin-secret")),
    "security.admin-key-shown": (P0, says(admin_api_key="admin-secret")),
    "security.endforward-open": (CLUSTER, sbs_says(routers=["tcp://192.0.2.1:7600"])),
    "router.unreachable": (ROUTER, router_gone),
    "router.not-ours": (ROUTER, router_is_foreign),
    "router.key": (ROUTER, router_answers("/workers", 401)),
    "router.not-ready": (ROUTER, router_answers("/readiness", 503)),
    "router.worker-missing": (P0, router_lacks),
    "router.worker-extra": (ROUTER, router_has_more),
    "router.worker-down": (P0, router_worker(usable=False, circuit_breaker="open")),
    "router.rooms-left": (P0, router_worker(rooms_left=3)),
    "router.problem": (P0, router_worker(problems={"loads": "of no use"})),
    "router.polls": (P0, router_worker(signal="polls", endforward_age_s=None)),
    "router.alone": (ROUTER, router_is_alone),
    "router.not-holding": (ROUTER, router_state("holding", False)),
    "router.throttled": (ROUTER, router_state("throttled", True)),
    "probe.failed": ("pair", lambda r: r.flags.append("--probe")),
}
"""Finding -> where it is expected, and what to break."""

ALSO_TESTED = {
    *("reach.wrong-scheme", "reach.certificate", "reach.not-sglang"),
    *("bootstrap.loopback", "security.plain-key", "security.key-file-mode", "security.no-key"),
    *("cache.approximate", "flags.rust-idle"),
}
"""Findings that have tests of their own below."""

HEALTHY = {
    *("reach.ok", "version.ok", "plugin.ok", "endforward.ok", "limits.ok", "flags.ok", "pair.ok"),
    *("latency.ok", "bootstrap.ok", "cache.approximate", "room.ok", "security.no-key"),
}
HEALTHY_ELSEWHERE = {"cache.exact", "security.ok", "router.ok", "probe.ok"}
