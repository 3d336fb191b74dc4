"""How the host of a prefill instance is sent to decode."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest

from sglang_sbs.router.workers.host_spelling import OLDER_S, respelled, spelling_for
from sglang_sbs.router.workers.server_info import SbsBlock

PREFILL = SbsBlock(boot_id="b", booted_s=1000)


@pytest.mark.parametrize(
    ("host", "ways"), [("10.1.2.3", 1 << 16), ("prefill-0.pd.svc", 4095), ("::1", 255), ("p0", 1)]
)
def test_every_spelling_of_a_host_means_the_same_and_is_another(host: str, ways: int) -> None:
    assert respelled(host, 0) == host
    spelled = {respelled(host, n) for n in range(1, 1 + (1 << 16))}
    assert len(spelled) == ways
    assert host not in spelled
    for text in spelled:
        if ":" in host:
            assert ip_address(text) == ip_address(host)
        elif host[0].isdigit():
            assert socket.inet_aton(text) == socket.inet_aton(host)
        else:
            assert text.lower() == host


@pytest.mark.parametrize("host", ["10.1.2.3", "prefill-0.pd.svc", "fe80::a:1", "2001:db8:1111::1"])
def test_restarts_that_follow_each_other_are_spelled_apart(host: str) -> None:
    assert len({respelled(host, n) for n in range(60)}) >= 30


def spelled(prefill: SbsBlock, *decode: SbsBlock | None) -> int:
    return spelling_for("10.1.2.3", prefill, decode, {})


def test_a_host_is_spelled_anew_where_some_decode_instance_may_know_an_older_process() -> None:
    older = SbsBlock(boot_id="d", booted_s=PREFILL.booted_s - OLDER_S)
    as_old = SbsBlock(boot_id="d", booted_s=PREFILL.booted_s - OLDER_S + 1)
    younger = SbsBlock(boot_id="d", booted_s=2000)
    assert spelled(PREFILL) == spelled(PREFILL, as_old, younger) == 0
    assert spelled(PREFILL, younger, older) > 0


@pytest.mark.parametrize("silent", [None, SbsBlock(boot_id="d")], ids=["no plugin", "an older one"])
def test_where_decode_says_nothing_restarts_that_were_seen_count(silent: SbsBlock | None) -> None:
    called: dict[str, str] = {}
    assert spelling_for("10.1.2.3", PREFILL, [silent], called) == 0
    assert spelling_for("10.1.2.3", PREFILL, [silent], called) == 0
    again = SbsBlock(boot_id="b2", booted_s=1)
    spelling = spelling_for("10.1.2.3", again, [silent], called)
    assert spelling == spelling_for("10.1.2.3", again, [silent], called) > 0


def test_a_spelling_that_was_handed_over_stays_with_its_boot() -> None:
    """Decode says nothing, and this process has seen no restart: the one before it has."""
    called: dict[str, str] = {}
    for _ in range(2):
        assert spelling_for("10.1.2.3", PREFILL, [None], called, 53042) == 53042
    again = SbsBlock(boot_id="b2", booted_s=1)
    assert spelling_for("10.1.2.3", again, [None], called, 53042) not in (0, 53042)


def test_the_spelling_goes_with_the_boot() -> None:
    older = SbsBlock(boot_id="d", booted_s=1)
    spellings = {spelled(SbsBlock(boot_id=f"b{n}", booted_s=50), older) for n in range(100)}
    assert len(spellings) >= 98
    assert spelled(PREFILL, older) == spelled(PREFILL, older, older)


def test_boots_that_a_router_saw_are_called_differently_as_long_as_there_are_ways() -> None:
    older, called = SbsBlock(boot_id="d", booted_s=1), dict[str, str]()
    for repeat in range(2):
        for boot in ("b0", "b1", "b2"):
            sbs = SbsBlock(boot_id=boot, booted_s=50)
            spelling = spelling_for("ab", sbs, [older], called)
            assert called[respelled("ab", spelling)] == boot, repeat
    assert set(called) == {"Ab", "aB", "AB"}
    assert spelling_for("ab", SbsBlock(boot_id="b3", booted_s=50), [older], called) > 0
    for number in range(5000):
        sbs = SbsBlock(boot_id=f"b{number}", booted_s=50)
        spelling_for("10.1.2.3", sbs, [older], called)
    assert len(called) <= 256
