"""``sglang-sbs patch``: what it does in which environment, what it says, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_site import NEW, OLD, Site, a_patch

from sglang_sbs import cli as sglang_sbs_command
from sglang_sbs.patching import cli


@pytest.fixture(autouse=True)
def _fake_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = [a_patch(), a_patch(Package="sglang-router", Versions="0.3.2")]
    monkeypatch.setattr(cli, "load_patches", lambda: patches)


def run(site: Path, *words: str) -> int:
    return cli.main([*words, "--site", str(site)])


def test_status_apply_status_revert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site.make(tmp_path)
    assert run(tmp_path, "status") == 1
    assert "not applied" in capsys.readouterr().out
    assert run(tmp_path, "apply") == 0
    assert "changed sglang/first.py" in capsys.readouterr().out
    assert site.content() == NEW
    assert run(tmp_path, "status") == 0
    assert run(tmp_path, "apply") == 0
    assert "already applied" in capsys.readouterr().out
    assert run(tmp_path, "revert") == 0
    assert site.content() == OLD
    assert run(tmp_path, "revert") == 0
    assert "already reverted" in capsys.readouterr().out


def test_the_console_command_has_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Site.make(tmp_path)
    assert sglang_sbs_command.main(["patch", "apply", "--site", str(tmp_path)]) == 0
    assert "  patch " in sglang_sbs_command.usage()


def test_json_has_the_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Site.make(tmp_path)
    assert run(tmp_path, "apply", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    (package,) = answer["packages"]
    assert answer["ok"] is True
    assert (package["package"], package["version"]) == ("sglang", "0.5.9")
    assert (package["state"], package["changed"]) == ("patched", list(OLD))
    files = {file["path"]: file for file in package["files"]}
    for wanted in a_patch().files:
        assert files[str(tmp_path / wanted.path)]["sha256"] == wanted.after


def test_an_engine_that_loads_plugins_needs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site.make(tmp_path, "0.5.23", files=OLD | {"sglang/srt/plugins/hook_registry.py": ""})
    assert run(tmp_path, "apply", "--version", "0.5.9") == 1
    assert "sglang 0.5.23 is installed, not 0.5.9" in capsys.readouterr().out
    for action in ("status", "apply", "revert"):
        assert run(tmp_path, action) == 0
        assert "nothing to patch" in capsys.readouterr().out
    assert site.content() == OLD


def test_a_release_without_a_patch_is_refused_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Site.make(tmp_path, "0.5.7")
    assert run(tmp_path, "apply") == 1
    said = capsys.readouterr().out
    assert "no patch for sglang 0.5.7; there are some for 0.5.9" in said
    assert "0.5.11" in said


def test_another_release_than_expected_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site.make(tmp_path)
    assert run(tmp_path, "apply", "--version", "0.5.8") == 1
    assert "sglang 0.5.9 is installed, not 0.5.8" in capsys.readouterr().out
    assert site.content() == OLD
    assert run(tmp_path, "apply", "--version", "0.5.9") == 0


def test_a_build_from_source_needs_its_release_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site.make(tmp_path, "0.0.0.dev0")
    assert run(tmp_path, "apply") == 1
    assert "--version" in capsys.readouterr().out
    assert run(tmp_path, "apply", "--version", "0.5.9") == 0
    assert site.content() == NEW


def test_a_changed_tree_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site.make(tmp_path)
    (tmp_path / "sglang/first.py").write_text("mine\n")
    for action in ("status", "apply", "revert"):
        assert run(tmp_path, action) == 1
        assert "Reinstall the package" in capsys.readouterr().out
    assert site.content()["sglang/first.py"] == "mine\n"


def test_an_editable_install_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site.make(tmp_path)
    origin = {"url": "file:///src/sglang/python", "dir_info": {"editable": True}}
    (site.info() / "direct_url.json").write_text(json.dumps(origin))
    assert run(tmp_path, "apply") == 1
    said = capsys.readouterr().out
    assert "editable install of /src/sglang/python" in said
    assert "patch -p1 -d /src/sglang/python <" in said
    assert site.content() == OLD


@pytest.mark.parametrize("text", ["{", "[]", '{"url": "file:///x", "dir_info": null}'])
def test_odd_metadata_is_no_editable_install(tmp_path: Path, text: str) -> None:
    site = Site.make(tmp_path)
    (site.info() / "direct_url.json").write_text(text)
    (tmp_path / "broken-1.0.dist-info").mkdir()
    assert run(tmp_path, "apply") == 0


def test_both_packages_are_patched_unless_one_is_named(tmp_path: Path) -> None:
    Site.make(tmp_path)
    info = tmp_path / "sglang_router-0.3.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang_router\nVersion: 0.3.2\n")
    reports = cli.run("status", site=tmp_path)
    assert [report.package for report in reports] == ["sglang", "sglang-router"]
    assert [r.package for r in cli.run("status", "sglang", site=tmp_path)] == ["sglang"]
    # A release number belongs to one of them.
    assert [r.package for r in cli.run("status", None, "0.3.2", tmp_path)] == ["sglang-router"]


def test_an_environment_without_either_says_where_it_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "apply") == 1
    said = capsys.readouterr().err
    assert f"{tmp_path} has no sglang or sglang-router" in said
    assert "--site" in said
    assert run(tmp_path / "nowhere", "status", "--json") == 1
    assert "no such folder" in json.loads(capsys.readouterr().out)["error"]


def test_bad_usage_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["undo"])
    assert error.value.code == 2
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    assert "sglang-sbs patch apply" in capsys.readouterr().out
