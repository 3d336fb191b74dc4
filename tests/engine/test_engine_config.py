"""Environment variables of the hook, and the entry point that reads them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_sbs import engine
from sglang_sbs.engine import install
from sglang_sbs.engine.config import ConfigError, join_tcp, load_config, split_tcp


def test_defaults() -> None:
    config = load_config({"SGLANG_SBS_ROUTERS": "tcp://r1:7600, ipc:///tmp/x ,tcp://[::1]:7600,"})
    assert config.routers == ("tcp://r1:7600", "ipc:///tmp/x", "tcp://[::1]:7600")
    assert (config.bind, config.instance_id) == (None, "")
    assert (config.decode_interval_s, config.heartbeat_s) == (0.05, 1.0)


def test_everything_can_be_set() -> None:
    config = load_config(
        {
            "SGLANG_SBS_BIND": "tcp://*:7600",
            "SGLANG_SBS_INSTANCE_ID": " http://p0:30000 ",
            "SGLANG_SBS_BOOT_ID": "fixed",
            "SGLANG_SBS_DECODE_INTERVAL_MS": "0",
            "SGLANG_SBS_HEARTBEAT_S": "2.5",
            "SGLANG_SBS_NODE_HOST": "10.0.0.2",
        }
    )
    assert (config.bind, config.instance_id) == ("tcp://*:7600", "http://p0:30000")
    assert (config.boot_id, config.decode_interval_s) == ("fixed", 0)
    assert (config.heartbeat_s, config.node_host) == (2.5, "10.0.0.2")


def test_boot_id_is_made_once_and_left_for_child_processes() -> None:
    environ = {"SGLANG_SBS_BIND": "tcp://*:7600"}
    first = load_config(environ)
    child = load_config(dict(environ))
    assert first.boot_id == child.boot_id == environ["SGLANG_SBS_BOOT_ID"]
    assert 0 < first.booted_s == child.booted_s <= time.time()
    restarted = load_config({"SGLANG_SBS_BIND": "tcp://*:7600"})
    assert restarted.boot_id != first.boot_id


@pytest.mark.parametrize("value", ["", "soon", "-1", "²", "1.5", "9" * 5000])
def test_a_boot_whose_time_is_not_known(value: str) -> None:
    environ = {"SGLANG_SBS_BOOT_ID": "given", "SGLANG_SBS_BOOTED_S": value}
    assert load_config(environ | {"SGLANG_SBS_BIND": "tcp://*:7600"}).booted_s == 0


@pytest.mark.parametrize(
    ("name", "value", "write"),
    [
        ("SGLANG_SBS_ROUTERS", "router:7600", "tcp://HOST:PORT"),
        ("SGLANG_SBS_ROUTERS", "http://router:7600", "tcp://HOST:PORT"),
        ("SGLANG_SBS_ROUTERS", "tcp://router", "tcp://HOST:PORT"),
        ("SGLANG_SBS_ROUTERS", "tcp://:7600", "tcp://HOST:PORT"),
        ("SGLANG_SBS_ROUTERS", "tcp://r1:7600,tcp://r2:70000", "1..65535"),
        ("SGLANG_SBS_ROUTERS", "tcp://::1:7600", "tcp://[ADDRESS]:PORT"),
        ("SGLANG_SBS_ROUTERS", "tcp://*:7600", "SGLANG_SBS_BIND"),
        ("SGLANG_SBS_ROUTERS", "ipc://", "ipc://PATH"),
        ("SGLANG_SBS_BIND", "7600", "tcp://*:7600"),
        ("SGLANG_SBS_BIND", "ipc:///tmp/x", "tcp://*:7600"),
        ("SGLANG_SBS_DECODE_INTERVAL_MS", "fast", "write e.g. 50"),
        ("SGLANG_SBS_DECODE_INTERVAL_MS", "-1", ">= 0"),
        ("SGLANG_SBS_HEARTBEAT_S", "0", ">= 0.05"),
        ("SGLANG_SBS_HEARTBEAT_S", "nan", "write e.g. 1"),
        ("SGLANG_SBS_GANG_GATE_MS", "-1", "write e.g. 40, or unset it for that default"),
        ("SGLANG_SBS_GANG_GATE_MS", "500", "more than 200"),
        ("SGLANG_SBS_NODE_HOST", "p1", "e.g. 10.0.0.2"),
        ("SGLANG_SBS_NODE_HOST", "0.0.0.0", "no router can connect"),
    ],
)
def test_a_bad_value_names_the_variable_and_what_to_write(
    name: str, value: str, write: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"SGLANG_SBS_BIND": "tcp://*:7600", name: value})
    assert str(caught.value).startswith(name + ":")
    assert write in str(caught.value)


@pytest.mark.parametrize("endpoint", ["tcp://r1:7600", "tcp://10.0.0.1:1", "tcp://[fe80::1]:65535"])
def test_endpoints_split_and_join(endpoint: str) -> None:
    assert join_tcp(*split_tcp(endpoint)) == endpoint


def test_a_bad_value_turns_the_hook_off_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_SBS_ROUTERS", "nonsense")
    with caplog.at_level(logging.INFO):
        engine.register()
    (record,) = caplog.records
    assert "EndForward is off: SGLANG_SBS_ROUTERS" in record.getMessage()


def test_without_configuration_nothing_is_loaded() -> None:
    program = (
        "import sys; from sglang_sbs.engine import register; register(); "
        "print([m for m in ('zmq', 'msgspec', 'sglang', 'sglang_sbs.wire') if m in sys.modules])"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_SBS_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_broken_installation_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_SBS_BIND", "tcp://127.0.0.1:7600")
    monkeypatch.delenv("SGLANG_SBS_BOOT_ID", raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    engine.register()
    monkeypatch.delenv("SGLANG_SBS_BOOT_ID", raising=False)
    assert "EndForward is off" in caplog.text


@pytest.mark.parametrize(("value", "seconds"), [("45", 45), ("", 0), ("-1", 0), ("9" * 20, 0)])
def test_the_limit_on_a_transfer_is_mooncakes_own(
    value: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", value)
    assert install._transfer_timeout_s() == seconds


def test_the_former_name_of_the_key_file_works_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o600)
    routers = {"SGLANG_SBS_ROUTERS": "tcp://r:7600"}
    now = load_config(routers | {"SGLANG_SBS_ENDFORWARD_KEY_FILE": str(key)})
    assert caplog.records == []
    before = load_config(routers | {"SGLANG_SBS_KEY_FILE": str(key)})
    assert now.keys == before.keys is not None
    assert "SGLANG_SBS_ENDFORWARD_KEY_FILE" in caplog.text
    both = {"SGLANG_SBS_KEY_FILE": "/other", "SGLANG_SBS_ENDFORWARD_KEY_FILE": str(key)}
    with pytest.raises(ConfigError, match="former name"):
        load_config(routers | both)
