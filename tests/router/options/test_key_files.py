"""Keys that are not in the command line, where all users of a machine see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.router_options import RouterOptions

PD = ("--prefill", "http://p:1", "--decode", "http://d:1", "--sbs-endforward-bind", "none")


def keys_of(*flags: str) -> tuple[str | None, str | None, list[str]]:
    options: RouterOptions = parse_flags([*PD, *flags])
    return options.api_key, options.admin_api_key, [key.key for key in options.control_plane_keys]


def test_keys_come_from_files(tmp_path: Path) -> None:
    api, admin, control = (tmp_path / name for name in ("api", "admin", "control"))
    api.write_text("  the-key \n")
    admin.write_text("the-boss")
    control.write_text("a:A:admin:k1\n\nb:B:user:k:2\n")
    flags = ("--api-key-file", str(api), "--admin-api-key-file", str(admin))
    more = ("--control-plane-api-keys-file", str(control))
    assert keys_of(*flags, *more) == ("the-key", "the-boss", ["k1", "k:2"])
    assert parse_flags([*PD, *flags]).monitor.api_key == "the-key"


def test_keys_come_from_the_environment_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SBS_API_KEY", "env-key")
    monkeypatch.setenv("SGLANG_SBS_ADMIN_KEY", "env-boss")
    monkeypatch.setenv("SGLANG_SBS_CONTROL_PLANE_KEYS", "a:A:admin:k1 b:B:user:k2")
    assert keys_of() == ("env-key", "env-boss", ["k1", "k2"])
    assert keys_of("--api-key", "mine")[0] == "mine"


def test_files_that_cannot_be_used_are_named_without_a_key(tmp_path: Path) -> None:
    empty, two = tmp_path / "empty", tmp_path / "two"
    empty.write_text("\n")
    two.write_text("s3cret-1\ns3cret-2\n")
    for path, why in ((tmp_path / "gone", "No such file"), (empty, "no key"), (two, "one key")):
        with pytest.raises(FlagError, match=why) as raised:
            keys_of("--api-key-file", str(path))
        assert str(path) in str(raised.value) and "s3cret" not in str(raised.value)
    with pytest.raises(FlagError, match="give one of them"):
        keys_of("--api-key", "x", "--api-key-file", str(two))
