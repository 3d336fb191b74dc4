"""A trial of two policies on a running router: ``/trial``, its flag, and its command."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from router_harness import Cluster, cluster, sse_events, until

from sglang_sbs.cli import main
from sglang_sbs.console.ask_router import KEY_VARIABLE
from sglang_sbs.router.trials import Trials
from sglang_sbs.trial.spec import TrialSpec

ADMIN = {"Authorization": "Bearer the-admin-key"}
KEYS = ("--admin-api-key", "the-admin-key", "--api-key", "the-clients-key")
LONG = {"baseline": "round_robin", "slot": "1h", "seed": 0}
"""Its first slot outlasts every test; with this seed it is the baseline's."""


async def ask(c: Cluster, method: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
    async with c.client.request(method, c.url + "/trial", json=body, **kwargs) as response:
        return response.status, await response.json(content_type=None)


async def put(c: Cluster, policy: str) -> int:
    async with c.client.put(c.url + "/policy", json={"policy": policy}) as response:
        return response.status


def trials(c: Cluster) -> Trials:
    found: Trials = c.server.scheduler.trials
    return found


async def test_the_admin_key_is_needed() -> None:
    async with cluster(*KEYS, real=True, prefill=0, decode=0, wait=False) as c:
        for headers in ({}, {"Authorization": "Bearer the-clients-key"}):
            for method in ("GET", "POST", "DELETE"):
                async with c.client.request(
                    method, c.url + "/trial", json=LONG, headers=headers
                ) as response:
                    assert response.status == 401
        assert not trials(c).running
        status, answer = await ask(c, "POST", LONG, headers=ADMIN)
        assert (status, answer["running"]) == (200, True)
        assert (await ask(c, "DELETE", headers=ADMIN))[1]["cause"] == "stopped"


async def test_a_trial_is_begun_shown_and_stopped_over_http() -> None:
    async with cluster(real=True) as c:
        answer = (await ask(c, "GET"))[1]
        assert answer == {"running": False, "text": "no trial has run"}
        status, answer = await ask(c, "POST", LONG)
        assert status == 200
        assert (answer["policy"], answer["baseline"], answer["now"]) == (
            "sbs",
            "round_robin",
            "baseline",
        )
        assert (answer["slot"], answer["slots"], answer["seed"]) == (0, 40, 0)
        assert c.server.scheduler.policy.policy == "round_robin"
        assert c.server.scheduler.policy.lasting == "sbs"
        status, refused = await ask(c, "POST", LONG)
        assert status == 400
        assert refused["error"]["code"] == "trial_refused"
        assert "DELETE /trial" in refused["error"]["message"]
        status, answer = await ask(c, "DELETE")
        assert (status, answer["running"], answer["cause"]) == (200, False, "stopped")
        state = c.server.scheduler.policy.state
        assert (state.policy, state.back_to) == ("sbs", "")
        again = (await ask(c, "DELETE"))[1]
        assert (again["cause"], again["ended_at"]) == ("stopped", answer["ended_at"])


@pytest.mark.parametrize(
    "body", [{}, [], "eta", {"baseline": "etta"}, {"baseline": "eta", "slot": 0}]
)
async def test_a_body_that_is_no_trial_begins_none(body: Any) -> None:
    async with cluster(real=True, prefill=0, decode=0, wait=False) as c:
        status, answer = await ask(c, "POST", body)
        assert status == 400
        assert "must be" in answer["error"]["message"] or "write" in answer["error"]["message"]
        assert c.server.scheduler.policy.state.switches == 0


async def test_a_body_that_is_too_large_for_a_trial_is_refused() -> None:
    async with cluster(real=True, prefill=0, decode=0, wait=False) as c:
        status, answer = await ask(c, "POST", {"baseline": "e" * 9000})
        assert status == 413
        assert "8192" in answer["error"]["message"]


async def test_slots_alternate_under_load_and_every_request_ends_once() -> None:
    async with cluster(real=True, prefill=2, decode=2) as c:
        arrived: Counter[str] = Counter()
        ended: Counter[str] = Counter()
        switches: list[str] = []

        def observe(event: Any, commands: Any, now_s: float) -> None:
            kind = type(event).__name__
            if kind == "RequestArrived":
                arrived[event.rid] += 1
            elif kind == "RequestEnded":
                ended[event.rid] += 1
            elif kind == "PolicySwitched":
                switches.append(event.policy)

        c.server.dispatcher.pump.observer = observe
        spec = TrialSpec("least_tokens", slot_s=0.1, slots=10, seed=3)
        trials(c).begin(spec)
        answered = 0

        async def client() -> None:
            nonlocal answered
            body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 2}}
            while trials(c).running:
                async with c.post("/generate", body) as response:
                    assert response.status == 200
                    assert sse_events(await response.read())[-1] == "[DONE]"
                answered += 1

        await asyncio.gather(*(client() for _ in range(8)))
        await c.settled()
        answer = (await ask(c, "GET"))[1]
        assert answer["slot"] == 10 or answer["cause"] in ("certain", "narrow")
        assert len(arrived) == answered
        assert arrived == ended
        assert set(ended.values()) == {1}
        assert len(switches) >= 3
        assert c.server.scheduler.policy.policy == "sbs"
        assert c.server.dispatcher.snapshot().policy == "sbs"
        assert all(arm["slots"] >= 3 for arm in answer["arms"].values())
        assert sum(arm["requests"] for arm in answer["arms"].values()) <= answered
        assert c.server.dispatcher.pump.trial is None


@pytest.mark.parametrize("policy", ["eta", "round_robin"])
async def test_a_switch_by_hand_ends_it_and_holds(policy: str) -> None:
    """Also a switch to the policy that the trial has in force at the moment."""
    async with cluster(real=True) as c:
        await ask(c, "POST", LONG)
        assert await put(c, policy) == 200
        await until(lambda: not trials(c).running)
        answer = (await ask(c, "GET"))[1]
        assert answer["cause"] == "switched"
        assert f"the policy was switched to {policy} by " in answer["ended"]
        in_force = c.server.scheduler.policy
        assert (in_force.policy, in_force.lasting) == (policy, policy)


async def test_a_limit_ends_it_while_requests_wait() -> None:
    async with cluster(real=True) as c:
        c.prefill[0].gate.close()
        await ask(c, "POST", LONG | {"p99": "10ms"})
        waiting = [asyncio.create_task(c.generate(text="hello")) for _ in range(8)]
        await until(lambda: not trials(c).running)
        answer = (await ask(c, "GET"))[1]
        assert answer["cause"] == "limit"
        assert "waited longer than 0.01 s" in answer["ended"]
        assert c.server.scheduler.policy.policy == "sbs"
        c.prefill[0].gate.open()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 8


async def test_the_flag_begins_it_with_the_first_request() -> None:
    async with cluster("--sbs-trial", "round_robin,slot=1h,seed=0", real=True) as c:
        answer = (await ask(c, "GET"))[1]
        assert answer["text"] == "a trial against round_robin begins with the first request"
        assert c.server.scheduler.policy.policy == "sbs"
        assert (await c.generate(text="hello"))[0] == 200
        await until(lambda: trials(c).running)
        assert c.server.scheduler.policy.policy == "round_robin"


async def test_the_flag_begins_none_where_somebody_has_switched_before() -> None:
    async with cluster("--sbs-trial", "round_robin,slot=1h,seed=0", real=True) as c:
        await put(c, "eta")
        await c.generate(text="hello")
        await until(lambda: "did not begin" in trials(c)._text())
        assert c.server.scheduler.policy.policy == "eta"


async def test_a_defect_of_the_trial_is_not_the_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(real=True) as c:
        await ask(c, "POST", LONG)
        running = trials(c)._trial
        monkeypatch.setattr(running, "observe", lambda *_: 1 / 0)
        assert (await c.generate(text="hello"))[0] == 200
        await until(lambda: not trials(c).running)
        assert (await ask(c, "GET"))[1]["cause"] == "failed"
        assert c.server.scheduler.policy.policy == "sbs"
        assert c.server.dispatcher.scheduler_errors == 0


async def test_metrics_and_the_dashboard_show_it() -> None:
    async with cluster(real=True) as c:
        frame = c.server.scheduler.feed
        takes: list[bytes] = []
        frame.watch(lambda payload, full: takes.append(payload))()
        assert b'"trial":null' in takes[-1]
        await ask(c, "POST", LONG)
        await c.generate(text="hello")
        url = f"http://127.0.0.1:{c.server.prometheus_port}/metrics"
        async with c.client.get(url) as response:
            page = await response.text()
        assert 'sbs_trial_arm{arm="baseline",policy="round_robin"} 1.0' in page
        assert 'sbs_trial_arm{arm="policy",policy="sbs"} 0.0' in page
        assert "sbs_trial_slots 0.0" in page
        frame.watch(lambda payload, full: takes.append(payload))()
        assert b'"baseline":"round_robin"' in takes[-1]


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, ["trial", *argv])


async def test_the_command_begins_shows_and_stops_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "the-admin-key")
    async with cluster(*KEYS, real=True) as c:
        where = ("--router", c.url)
        assert await run(*where) == 0
        assert capsys.readouterr().out == "no trial has run\n"
        assert await run("round_robin,slot=1h,seed=0", *where) == 0
        shown = capsys.readouterr().out
        assert "trial of sbs against round_robin: no verdict yet after 0 slots" in shown
        assert "slot 1 of at most 40: round_robin decides for another 3600 s" in shown
        assert await run("eta", *where) == 1
        assert "a trial is already running" in capsys.readouterr().err
        assert await run("--stop", "--json", *where) == 0
        assert '"cause": "stopped"' in capsys.readouterr().out
        assert c.server.scheduler.policy.policy == "sbs"


def test_bad_arguments_of_the_command_are_reported_before_a_router_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["eta,slot"], ["eta,slot=never"], ["eta", "--stop"]):
        with pytest.raises(SystemExit) as stop:
            main(["trial", *words, "--router", "http://127.0.0.1:9"])
        assert stop.value.code == 2
    assert "slot=180s" in capsys.readouterr().err
