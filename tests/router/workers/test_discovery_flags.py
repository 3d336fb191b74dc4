"""The flags of service discovery."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_sbs.console import extras
from sglang_sbs.launch_router import main
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.config import (
    BOOTSTRAP_PORT_ANNOTATION,
    DiscoveryConfig,
    parse_selector,
)
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.workers.kubernetes_pods import read_pod
from tools.stand_ins.kubernetes_server import pod

P = {"app": "sglang", "component": "prefill"}


FLAGS = (
    *("--service-discovery", "--prefill-selector", "app=sglang", "component=prefill"),
    *("--decode-selector", "app=sglang", "component=decode"),
)


def test_the_flags_of_the_stock_router() -> None:
    options = parse_flags(
        [*FLAGS, "--service-discovery-port", "8000", "--service-discovery-namespace", "llm"]
    )
    assert options.discovery == DiscoveryConfig(
        "app=sglang,component=prefill", "app=sglang,component=decode", 8000, "llm"
    )
    assert options.roles_without_workers == []
    assert parse_flags(FLAGS).discovery == DiscoveryConfig(
        "app=sglang,component=prefill", "app=sglang,component=decode", 80, None
    )


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["a=b", "c=d"], "a=b,c=d"),
        (["a=b c=d"], "a=b,c=d"),
        (["a=b,c=d"], "a=b,c=d"),
        (["example.com/role=prefill"], "example.com/role=prefill"),
        (["a="], "a="),
    ],
)
def test_selectors_may_be_one_word_or_several(words: list[str], meant: str) -> None:
    assert parse_selector(words) == meant


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--service-discovery"], ["--service-discovery needs", "--prefill-selector"]),
        (["--service-discovery", "--prefill-selector", "app"], ["--prefill-selector", "KEY=VALUE"]),
        (["--service-discovery", "--decode-selector", "a=b", "a=c"], ["--decode-selector", "a"]),
        (["--service-discovery", "--decode-selector", "a=b&watch=1"], ["--decode-selector"]),
        (
            ["--service-discovery", "--prefill-selector", "a=b", "--decode-selector", "a=b"],
            ["are the same"],
        ),
        ([*FLAGS, "--service-discovery-port", "http"], ["--service-discovery-port", "0..65535"]),
    ],
)
def test_mistakes_name_the_flag(argv: list[str], words: list[str]) -> None:
    with pytest.raises(FlagError) as error:
        parse_flags(argv)
    for word in words:
        assert word in str(error.value)


def test_selectors_without_discovery_are_warned_about() -> None:
    warnings = parse_flags(["--prefill-selector", "a=b"]).warnings
    assert any("--prefill-selector has no effect without --service-disc" in w for w in warnings)


def test_one_role_may_be_discovered_and_the_other_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    half = ["--service-discovery", "--prefill-selector", "a=b"]
    assert parse_flags(half).roles_without_workers == ["decode"]
    assert not parse_flags([*half, "--decode", "http://d0:30000"]).roles_without_workers
    assert main(half) == 2
    assert "--service-discovery with selectors" in capsys.readouterr().err


def test_without_the_client_package_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(FlagError, match=r"pip install 'sglang-sbs\[kubernetes\]'"):
        parse_flags(FLAGS)


@pytest.mark.parametrize(("text", "port"), [("8998", 8998), ("x", None), ("0", None), ("", None)])
def test_a_bad_bootstrap_port_is_asked_of_the_engine(text: str, port: int | None) -> None:
    annotated = pod("p0", "fd00::7", labels=P, annotations={BOOTSTRAP_PORT_ANNOTATION: text})
    found: Any = read_pod(annotated, "prefill", 80)
    assert found.bootstrap_port == port
    assert found.url == "http://[fd00::7]:80"
