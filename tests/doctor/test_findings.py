"""Every finding appears on a cluster with just that defect, and none of them on a healthy one."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_rig import DP, Engine, Rig, rig
from rust_mock_engine import RustMockEngine

from sglang_sbs.doctor.examine import CATALOGUE, gather, judge
from sglang_sbs.doctor.facts import ClusterFacts, Target
from sglang_sbs.doctor.findings import CLUSTER, ROUTER, Finding, Severity
from sglang_sbs.doctor.options import parse_options
from sglang_sbs.engine.publish import Publisher
from sglang_sbs.wire import encode_endforward
from sglang_sbs.wire.curve import keys_of
from sglang_sbs.wire.endforward import KvAddress
from tools.stand_ins.kv_publisher import free_ports
from tools.stand_ins.mock_engine import Behaviour, Rooms

Break = Callable[[Rig], Awaitable[None] | None]

KV_EVENTS = {"publisher": "zmq", "topic": "", "block_size": 16, "dp_size": DP}


def ids(findings: list[Finding], subject: str | None = None) -> set[str]:
    return {one.id for one in findings if subject in (None, one.subject)}


def says(**fields: object) -> Break:
    """The first prefill engine's ``/server_info``."""
    return lambda r: r.prefill[0].info.update(fields)


def decode_says(**fields: object) -> Break:
    return lambda r: r.decode.info.update(fields)


def sbs_says(**fields: object) -> Break:
    return lambda r: r.prefill[0].sbs.update(fields)


def flags(*words: str) -> Break:
    return lambda r: r.flags.extend(words)


def unseen_plugin(r: Rig) -> None:
    """As SGLang 0.5.20, which has plugins and does not show them."""
    for engine in r.engines:
        engine.info |= {"version": "0.5.20", "sbs": None}


def silent(r: Rig) -> None:
    r.prefill[0].speaks = []


def publishes_kv(r: Rig, **fields: object) -> None:
    for engine in r.prefill:
        port, replay = free_ports(DP), free_ports(DP)
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
    port = free_ports(DP)
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
    """As when a router listens at the EndForward port; the engines' release hides the plugin."""
    unseen_plugin(r)
    port = free_ports(1)
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
    "limits.no-dp-attention": (P0, says(enable_dp_attention=False)),
    "limits.no-barrier": (P0, sbs_says(barrier=False)),
    "limits.no-chunking": (P0, says(chunked_prefill_size=-1)),
    "limits.chunk-small": (P0, says(chunked_prefill_size=128)),
    "limits.chunk-page": (P0, says(chunked_prefill_size=1000)),
    "limits.max-prefill-tokens": (P0, says(max_prefill_tokens=600)),
    "limits.few-running": (P0, says(internal_states=ONE_SLOT)),
    "limits.uneven": (CLUSTER, says(chunked_prefill_size=2048)),
    "flags.load-balance": (P0, says(load_balance_method="round_robin")),
    "flags.decode-ranks": (
        D0,
        decode_says(version="0.5.8", load_balance_method="total_tokens"),
    ),
    "flags.prefill-delayer": (P0, says(enable_prefill_delayer=True)),
    "flags.prefill-delayer-queue": (P0, says(prefill_delayer_queue_min_ratio=0.3)),
    "flags.min-free-slots-delay": (P0, says(min_free_slots_delay=4)),
    "flags.sleep-on-idle": (P0, says(sleep_on_idle=True)),
    "flags.overlap-disabled": (P0, says(disable_overlap_schedule=True)),
    "flags.schedule-policy": (P0, says(schedule_policy="lpm")),
    "flags.pipeline": (P0, says(pp_size=2)),
    "flags.role-switch": (P0, says(enable_pd_role_switch=True)),
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
    "router.problem": (P0, router_worker(problems={"loads": "of no use"})),
    "router.polls": (P0, router_worker(signal="polls", endforward_age_s=None)),
    "router.throttled": (ROUTER, router_state("throttled", True)),
    "probe.failed": ("pair", lambda r: r.flags.append("--probe")),
}
"""Finding -> where it is expected, and what to break."""

ALSO_TESTED = {
    *("reach.wrong-scheme", "reach.certificate", "reach.not-sglang"),
    *("bootstrap.loopback", "security.plain-key", "security.key-file-mode", "security.no-key"),
    *("cache.approximate", "flags.rust-idle"),
}
"""By tests of their own below."""

HEALTHY = {
    *("reach.ok", "version.ok", "plugin.ok", "endforward.ok", "limits.ok", "flags.ok", "pair.ok"),
    *("latency.ok", "bootstrap.ok", "cache.approximate", "room.ok", "security.no-key"),
}
HEALTHY_ELSEWHERE = {"cache.exact", "security.ok", "router.ok", "probe.ok"}


def test_every_finding_has_a_test() -> None:
    assert set(CATALOGUE) == set(BROKEN) | ALSO_TESTED | HEALTHY | HEALTHY_ELSEWHERE


async def test_a_healthy_cluster_has_nothing_worse_than_notes() -> None:
    async with rig() as r:
        findings = await r.examine()
    assert ids(findings) == HEALTHY
    for engine in r.engines:
        assert "endforward.ok" in ids(findings, engine.url)


@pytest.mark.parametrize("finding_id", BROKEN)
async def test_a_defect_is_found(finding_id: str) -> None:
    where, break_it = BROKEN[finding_id]
    async with rig() as r:
        subjects = {P0: r.prefill[0].url, P1: r.prefill[1].url, D0: r.decode.url}
        subject = subjects.get(where, where)
        if where == "pair":
            subject = f"{r.prefill[0].url} -> {r.decode.url}"
            r.decode.behaviour = Behaviour(status=500, message="no such rank")
        done = break_it(r)
        if done is not None:
            await done
        findings = await r.examine()
    found = [one for one in findings if one.id == finding_id and one.subject == subject]
    assert found, sorted((one.id, one.subject) for one in findings)
    assert found[0].seen
    assert found[0].change, "what to do about it"
    assert finding_id not in HEALTHY


async def test_what_delays_and_reorders_is_named_with_what_to_change() -> None:
    async with rig() as r:
        facts = await r.facts()

    def told(index: int, **fields: Any) -> dict[str, tuple[str, str]]:
        was = dict(facts.engines[index].data)
        facts.engines[index].data.update(fields)
        url = facts.engines[index].url
        findings = [one for one in judge(facts) if one.subject == url]
        facts.engines[index].data = was
        return {one.id: (one.seen, one.change) for one in findings if one.id.startswith("flags.")}

    held = {
        "enable_prefill_delayer": True,
        "prefill_delayer_queue_min_ratio": 0.25,
        "prefill_delayer_max_delay_ms": 2000.0,
        "min_free_slots_delay": 4,
    }
    found = told(0, **held)
    assert set(found) == {
        "flags.prefill-delayer",
        "flags.prefill-delayer-queue",
        "flags.min-free-slots-delay",
    }
    seen, change = found["flags.prefill-delayer-queue"]
    assert seen == "--prefill-delayer-queue-min-ratio 0.25, --prefill-delayer-max-delay-ms 2000"
    assert "--prefill-delayer-max-delay-ms" in change
    assert found["flags.min-free-slots-delay"][0] == "--min-free-slots-delay 4"
    assert set(told(2, **held)) == {"flags.ok"}, "a decode engine has no use for them"
    assert set(told(0, min_free_slots_delay=1)) == {"flags.ok"}, "which is none"
    for policy in ("lpm", "hrrn", "shortest-prefill-first", "lof"):
        seen, change = told(0, schedule_policy=policy)["flags.schedule-policy"]
        assert seen.startswith(f"--schedule-policy {policy}")
        assert (": " in seen) == (policy != "lof")
        assert change == f"start prefill engines with --schedule-policy fcfs instead of {policy}"


async def test_the_most_requests_of_a_pass_are_among_the_limits() -> None:
    async with rig() as r:
        r.prefill[0].info["prefill_max_requests"] = 6
        findings = await r.examine()
    uneven = next(one for one in findings if one.id == "limits.uneven")
    assert "6 requests per rank and pass" in uneven.seen


async def test_an_exact_cache_and_keys_that_fit() -> None:
    async with rig() as r:
        publishes_kv(r)
        wants_key("secret")(r)
        r.flags += ["--api-key", "secret", "--probe"]
        r.serve_router()
        findings = await r.examine()
    assert ids(findings) >= HEALTHY_ELSEWHERE, findings
    assert {one.severity for one in findings} == {Severity.OK}
    assert "secret" not in str(findings)


async def test_the_admin_key_that_fits_is_no_finding_and_no_key_is_ever_told() -> None:
    async with rig() as r:
        r.prefill[0].info["admin_api_key"] = "admin-secret"
        wants_key("user-secret")(r)
        r.flags += ["--api-key", "user-secret", "--admin-api-key", "admin-secret"]
        findings = await r.examine()
        assert not ids(findings) & {"security.admin-key", "security.admin-key-shown"}
        r.flags[-1] = "wrong"
        findings = await r.examine()
    assert "security.admin-key" in ids(findings, r.prefill[0].url)
    assert "admin-secret" not in str(findings)


async def test_ranks_that_serve_by_themselves_are_all_asked() -> None:
    rooms = Rooms()
    prefill, decode = (RustMockEngine(role, rooms=rooms) for role in ("prefill", "decode"))
    await prefill.start()
    await decode.start()
    words = ["--prefill", prefill.url, "--decode", decode.url, "--wait", "0.1", "--timeout", "5"]
    try:
        findings = judge(await gather(parse_options([*words, "--probe"])))
        assert {"reach.ok", "room.ok", "flags.rust-idle"} <= ids(findings, decode.url)
        assert "probe.ok" in ids(findings)
        prefill.lost_ranks.add(1)
        (named,) = (
            one for one in judge(await gather(parse_options(words))) if one.subject == prefill.url
        )
        assert named.id == "reach.rank-server"
        assert f"http://127.0.0.1:{prefill.port + 1}" in named.seen
    finally:
        await prefill.stop()
        await decode.stop()


async def test_something_else_that_speaks_http_is_no_engine() -> None:
    async with rig() as r:
        given_instead(lambda r: r.router.url)(r)
        findings = await r.examine()
        assert "reach.not-sglang" in ids(findings, r.router.url)


def altered(facts: ClusterFacts, change: Callable[[ClusterFacts], None]) -> list[Finding]:
    change(facts)
    return judge(facts)


async def test_decode_on_another_host_cannot_use_a_loopback_bootstrap_host() -> None:
    async with rig() as r:
        facts = await r.facts()

    def move_decode(facts: ClusterFacts) -> None:
        facts.engines[-1].target = Target("http://192.0.2.7:30000", "decode")

    assert "bootstrap.loopback" in ids(altered(facts, move_decode), r.prefill[0].url)


async def test_a_key_over_plain_http_to_another_host_is_told() -> None:
    async with rig() as r:
        wants_key("secret")(r)
        r.flags += ["--api-key", "secret"]
        facts = await r.facts()
        assert "security.plain-key" not in ids(judge(facts))

    def move_decode(facts: ClusterFacts) -> None:
        facts.engines[-1].target = Target("http://192.0.2.7:30000", "decode")

    assert "security.plain-key" in ids(altered(facts, move_decode))


async def test_the_secret_of_endforward_is_for_its_owner_only(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    async with rig() as r:
        r.flags += ["--sbs-endforward-key-file", str(key)]
        key.chmod(0o600)
        assert "security.key-file-mode" not in ids(await r.examine())
        key.chmod(0o640)
        assert "security.key-file-mode" in ids(await r.examine())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj"
    subprocess.run(
        [
            *(*command.split(), "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


async def test_https(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    async with rig() as r:
        port = r.decode.port
        await r.decode.stop()
        await r.decode.start(port, tls=context)
        await r.decode.speak()
        secure, plain = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port}"

        r.urls[secure] = plain
        assert "reach.wrong-scheme" in ids(await r.examine(), plain)
        del r.urls[secure]
        assert "reach.certificate" in ids(await r.examine(), secure)
        r.flags += ["--ca-cert-paths", str(cert)]
        assert "reach.ok" in ids(await r.examine(), secure)
        r.urls[r.prefill[0].url] = r.prefill[0].url.replace("http:", "https:")
        findings = await r.examine()
        assert "reach.wrong-scheme" in ids(findings, r.urls[r.prefill[0].url])


async def test_a_plugin_that_is_not_shown_is_found_by_what_it_sends() -> None:
    """One engine of each role: whose reports these are is clear without an id."""
    async with rig() as r:
        unseen_plugin(r)
        r.flags += ["--sbs-endforward-bind", r.endpoint]
        await r.prefill[1].stop()
        findings = await r.examine()
        assert "endforward.ok" in ids(findings, r.prefill[0].url)
        assert "endforward.ok" in ids(findings, r.decode.url)
        assert "plugin.absent" not in ids(findings)
        r.prefill[0].hush()  # not speaks = []: what it sent since would be heard
        assert "plugin.absent" in ids(await r.examine(), r.prefill[0].url)


async def test_ranks_of_another_node_have_another_boot_id() -> None:
    async with rig() as r:
        other_node = Engine("prefill", r.prefill[0]._rooms, r.endpoint)  # type: ignore[arg-type]
        r.prefill[0].speaks, other_node.speaks = [0], [1]
        await other_node.speak()
        r.cleanup.push_async_callback(other_node.stop)
        findings = await r.examine()
    assert "endforward.ok" in ids(findings, r.prefill[0].url)
    assert not ids(findings) & {"endforward.stranger", "endforward.rank-missing"}


async def test_the_same_secret_is_heard_and_another_one_is_told(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    async with rig() as r:
        r.flags += ["--sbs-endforward-key-file", str(key), "--wait", "3"]
        for engine in r.engines:
            engine.sbs["encrypted"] = True
            engine.hush()
            await engine.speak(keys_of("k" * 40))
        findings = await r.examine()
        assert all("endforward.ok" in ids(findings, engine.url) for engine in r.engines)
        r.decode.hush()
        await r.decode.speak(keys_of("another" * 10))
        findings = await r.examine()
    assert "endforward.ok" in ids(findings, r.prefill[0].url)
    assert "endforward.silent" in ids(findings, r.decode.url)
    assert "endforward.key" in ids(findings, CLUSTER)


async def test_engines_that_listen_are_dialled() -> None:
    port = free_ports(DP)
    async with rig() as r:
        engine = r.prefill[0]
        engine.hush()
        engine.sbs |= {"routers": [], "bind": f"tcp://*:{port}"}
        assert "endforward.silent" in ids(await r.examine(), engine.url)
        publishers = [Publisher([], f"tcp://127.0.0.1:{port + rank}") for rank in range(DP)]

        async def speak() -> None:
            while True:
                for rank, publisher in enumerate(publishers):
                    publisher.send(encode_endforward(engine.report(rank, kind="heartbeat")))
                await asyncio.sleep(0.02)

        speaker = asyncio.create_task(speak())
        try:
            findings = await r.examine()
        finally:
            speaker.cancel()
            for publisher in publishers:
                publisher.close()
    assert {"endforward.ok", "plugin.ok"} <= ids(findings, engine.url)


async def test_a_rank_that_a_router_never_heard_is_missing() -> None:
    async with rig() as r:
        router_age(None)(r)
        findings = await r.examine()
        assert "endforward.rank-missing" in ids(findings, r.prefill[0].url)
        assert "endforward.ok" in ids(findings, r.decode.url)


async def test_a_router_that_has_just_started_is_given_time_to_hear_every_rank() -> None:
    async with rig() as r:
        router_age(None)(r)
        examined = asyncio.create_task(r.examine())
        await asyncio.sleep(0.3)
        assert "/server_info" in r.router.keys  # it was asked once
        r.router_state()["prefill"][0]["ranks"][1]["age_s"] = 0.1
        findings = await examined
        assert "endforward.rank-missing" not in ids(findings)
        assert "endforward.ok" in ids(findings, r.prefill[0].url)


async def test_a_router_that_does_not_use_reports_may_lack_them() -> None:
    async with rig() as r:
        r.serve_router()[0]["signal"] = "polls"
        assert "router.polls" in ids(await r.examine())
        r.router_state()["policy"] = "round_robin"
        assert "router.polls" not in ids(await r.examine())


async def test_a_control_plane_key_opens_the_router() -> None:
    async with rig() as r:
        r.serve_router()
        seen = r.router.keys
        r.flags += ["--control-plane-api-keys", "ops:Ops:admin:control", "--api-key", "user"]
        await r.examine()
    assert seen["/workers"] == "Bearer control"
    assert seen["/server_info"] == "Bearer user"


async def test_ports_of_other_nodes_are_looked_at_where_their_ranks_speak_from() -> None:
    async with rig() as r:
        lies_over_two_nodes(r)
        port, replay = free_ports(DP), free_ports(DP)
        r.prefill[0].says["kv_address"] = KvAddress("", port, replay)
        url = r.prefill[0].url
        found = {one.id: one for one in await r.examine() if one.subject == url}
        assert found["cache.unreachable"].seen == (
            f"no connection to 127.0.0.1:{port} (rank 1 on node 1), "
            f"127.0.0.1:{replay} (rank 1 on node 1, replays)"
        )
        r.listen_at(port)
        r.listen_at(replay)
        assert "cache.exact" in ids(await r.examine(), url)


async def test_a_rank_of_another_node_that_does_not_report_is_named_with_what_to_open() -> None:
    async with rig() as r:
        lies_over_two_nodes(r)
        r.prefill[0].speaks.remove(1)
        found = [one for one in await r.examine() if one.id == "endforward.rank-missing"]
        assert [one.subject for one in found] == [r.prefill[0].url]
        assert "rank 1 (node 1)" in found[0].seen
        assert f"let node 1 connect to {r.endpoint}" in found[0].change
