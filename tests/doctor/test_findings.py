"""Every finding appears on a cluster with just that defect, and none of them on a healthy one."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from defects import (
    ALSO_TESTED,
    BROKEN,
    D0,
    HEALTHY,
    HEALTHY_ELSEWHERE,
    P0,
    P1,
    given_instead,
    ids,
    lies_over_two_nodes,
    publishes_kv,
    router_age,
    unseen_plugin,
    wants_key,
)
from doctor_rig import DP, Engine, rig
from harness.until import until
from rust_mock_engine import RustMockEngine

from sglang_sbs.doctor.checks.cluster import attention_tp
from sglang_sbs.doctor.examine import CATALOGUE, gather, judge
from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts
from sglang_sbs.doctor.findings import CLUSTER, Finding, Severity
from sglang_sbs.doctor.gathering import endforward
from sglang_sbs.doctor.options import parse_options
from sglang_sbs.engine.publish import Publisher, resolve_endpoints
from sglang_sbs.wire import encode_endforward
from sglang_sbs.wire.curve import keys_of
from sglang_sbs.wire.endforward import KvAddress
from tools.stand_ins.mock_engine import Behaviour, Rooms
from tools.stand_ins.ports import free_ports


def test_every_finding_has_a_test() -> None:
    assert set(CATALOGUE) == set(BROKEN) | ALSO_TESTED | HEALTHY | HEALTHY_ELSEWHERE


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ({"dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": True}, 2),
        ({"dp_size": 1, "attn_dp_size": 4}, 2),
        ({"dp_size": 4, "enable_dp_attention": True}, 2),
        ({"dp_size": 4, "enable_dp_attention": False}, 8),
        ({"dp_size": 4, "attn_dp_size": 1}, 8),
        ({"attn_dp_size": 4, "attn_cp_size": 2}, 1),
        ({}, 8),
    ],
)
def test_attention_tp_is_known_of_every_release(said: dict[str, Any], size: int) -> None:
    """``enable_dp_attention`` will be dropped from ``/server_info``; ``attn_dp_size`` says it."""
    assert attention_tp(EngineFacts("http://p:1", "prefill", data={"tp_size": 8} | said)) == size


async def test_priority_is_no_fault_where_the_engine_orders_by_it() -> None:
    async with rig() as r:
        r.prefill[0].info |= {"abort_on_priority_when_disabled": True}
        r.prefill[0].info |= {"enable_priority_scheduling": True}
        assert "flags.abort-on-priority" not in ids(await r.examine())


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
    found = [
        finding for finding in findings if finding.id == finding_id and finding.subject == subject
    ]
    assert found, sorted((finding.id, finding.subject) for finding in findings)
    assert found[0].seen
    assert found[0].change, "what to do about it"
    assert finding_id not in HEALTHY


async def test_what_delays_and_reorders_is_named_with_what_to_change() -> None:
    async with rig() as r:
        facts = await r.facts()

    def flag_findings(index: int, **fields: Any) -> dict[str, tuple[str, str]]:
        was = dict(facts.engines[index].data)
        facts.engines[index].data.update(fields)
        url = facts.engines[index].url
        findings = [finding for finding in judge(facts) if finding.subject == url]
        facts.engines[index].data = was
        return {
            finding.id: (finding.seen, finding.change)
            for finding in findings
            if finding.id.startswith("flags.")
        }

    held = {
        "enable_prefill_delayer": True,
        "prefill_delayer_queue_min_ratio": 0.25,
        "prefill_delayer_max_delay_ms": 2000.0,
        "min_free_slots_delay": 4,
    }
    found = flag_findings(0, **held)
    assert set(found) == {
        "flags.prefill-delayer",
        "flags.prefill-delayer-queue",
        "flags.min-free-slots-delay",
    }
    seen, change = found["flags.prefill-delayer-queue"]
    assert seen == "--prefill-delayer-queue-min-ratio 0.25, --prefill-delayer-max-delay-ms 2000"
    assert "--prefill-delayer-max-delay-ms" in change
    assert found["flags.min-free-slots-delay"][0] == "--min-free-slots-delay 4"
    assert set(flag_findings(2, **held)) == {"flags.ok"}, "a decode engine has no use for them"
    assert set(flag_findings(0, min_free_slots_delay=1)) == {"flags.ok"}, "which is none"
    for policy in ("lpm", "hrrn", "shortest-prefill-first", "lof"):
        seen, change = flag_findings(0, schedule_policy=policy)["flags.schedule-policy"]
        assert seen.startswith(f"--schedule-policy {policy}")
        assert (": " in seen) == (policy != "lof")
        assert change == f"start prefill engines with --schedule-policy fcfs instead of {policy}"


async def test_the_most_requests_of_a_pass_are_among_the_limits() -> None:
    async with rig() as r:
        r.prefill[0].info["prefill_max_requests"] = 6
        findings = await r.examine()
    uneven = next(finding for finding in findings if finding.id == "limits.uneven")
    assert "6 requests per rank and pass" in uneven.seen


async def test_an_exact_cache_and_keys_that_fit() -> None:
    async with rig() as r:
        publishes_kv(r)
        wants_key("secret")(r)
        r.flags += ["--api-key", "secret", "--probe"]
        r.serve_router()
        findings = await r.examine()
    assert ids(findings) >= HEALTHY_ELSEWHERE, findings
    worse = {finding.id for finding in findings if finding.severity is not Severity.OK}
    assert worse == {"pair.retraction-key"}, "decode's own requests to prefill send no key"
    assert "secret" not in str(findings)


async def test_the_admin_key_that_fits_is_no_finding_and_no_key_is_ever_shown() -> None:
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
        facts = await gather(parse_options(["--prefill", prefill.url, "8998", *words[2:]]))
        assert "bootstrap.wrong-port" not in ids(judge(facts)), "routers use the engine's own"
        asked = facts.engines[0].bootstrap
        assert asked is not None
        assert asked.port == prefill.port
        prefill.lost_ranks.add(1)
        (named,) = (
            finding
            for finding in judge(await gather(parse_options(words)))
            if finding.subject == prefill.url
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
        facts.engines[-1].url = "http://192.0.2.7:30000"

    assert "bootstrap.loopback" in ids(altered(facts, move_decode), r.prefill[0].url)


async def test_a_key_over_plain_http_to_another_host_is_reported() -> None:
    async with rig() as r:
        wants_key("secret")(r)
        r.flags += ["--api-key", "secret"]
        facts = await r.facts()
        assert "security.plain-key" not in ids(judge(facts))

    def move_decode(facts: ClusterFacts) -> None:
        facts.engines[-1].url = "http://192.0.2.7:30000"

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
        r.prefill[0].hush()  # not speaks = []: what it sent since would be received
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


async def test_reports_with_the_secret_arrive_and_another_secret_is_named(tmp_path: Path) -> None:
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


async def test_engines_that_listen_are_dialled_by_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """libzmq would look a name up in the thread that receives everything."""
    port = free_ports(DP)[0]
    name = "engine.invalid"  # no real name server has it
    named = [f"tcp://{name}:{port + rank}" for rank in range(DP)]
    monkeypatch.setattr(endforward, "publisher_endpoints", lambda *_: named)

    def resolve(host: str, port: int) -> frozenset[str]:
        return resolve_endpoints("127.0.0.1" if host == name else host, port)

    monkeypatch.setattr(endforward, "resolve_endpoints", resolve)
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


async def test_a_rank_that_never_reported_to_a_router_is_missing() -> None:
    async with rig() as r:
        router_age(None)(r)
        findings = await r.examine()
        assert "endforward.rank-missing" in ids(findings, r.prefill[0].url)
        assert "endforward.ok" in ids(findings, r.decode.url)


async def test_a_router_that_has_just_started_is_given_time_to_hear_every_rank() -> None:
    async with rig() as r:
        router_age(None)(r)
        examined = asyncio.create_task(r.examine())
        await until(lambda: "/server_info" in r.router.keys)  # it was asked once
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
        port, replay = free_ports(DP)[0], free_ports(DP)[0]
        r.prefill[0].says["kv_address"] = KvAddress("", port, replay)
        url = r.prefill[0].url
        found = {finding.id: finding for finding in await r.examine() if finding.subject == url}
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
        found = [
            finding for finding in await r.examine() if finding.id == "endforward.rank-missing"
        ]
        assert [finding.subject for finding in found] == [r.prefill[0].url]
        assert "rank 1 (node 1)" in found[0].seen
        assert f"let node 1 connect to {r.endpoint}" in found[0].change


async def test_a_silent_rank_is_found_if_the_router_spells_the_host_otherwise() -> None:
    async with rig() as r:
        for worker in r.serve_router():
            worker["url"] = worker["url"].replace("127.0.0.1", "localhost")
        for instance in r.router_state()["prefill"]:
            instance["instance"] = instance["instance"].replace("127.0.0.1", "localhost")
            instance["ranks"][1]["age_s"] = 60.0
        assert "endforward.stale" in ids(await r.examine(), r.prefill[0].url)


@pytest.mark.parametrize(("slots", "uneven"), [(2045, False), (1024, True)])
async def test_limits_that_follow_from_free_memory_may_differ_a_little(
    slots: int, uneven: bool
) -> None:
    async with rig() as r:
        for engine, number in zip(r.prefill, (2048, slots), strict=True):
            state = {"effective_max_running_requests_per_dp": number}
            engine.info["internal_states"] = [state] * DP
        assert ("limits.uneven" in ids(await r.examine())) is uneven
