"""The reference pages say what the code says, and nothing in them is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang_sbs.cli import VERBS
from tools.reference import command, commands, errors, http_api, pages


@pytest.mark.parametrize("page", command.PAGES)
def test_a_reference_page_is_what_the_code_says(page: str) -> None:
    assert list(command.outdated([page])) == [], "run scripts/reference"


@pytest.mark.parametrize("page", ["errors.md", "environment.md", "findings.md", "http-api.md"])
def test_everything_in_a_reference_has_a_meaning(page: str) -> None:
    rows = re.findall(r"^\| .*\|$", (pages.DOCS / "reference" / page).read_text(), re.MULTILINE)
    assert len(rows) > 20
    assert [row for row in rows if re.search(r"\|\s*\|", row)] == []


def test_an_old_page_is_noticed_and_what_is_written_by_hand_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "reference/errors.md"
    here = (pages.DOCS / page).read_text()
    for module in (pages, command):
        monkeypatch.setattr(module, "DOCS", tmp_path)
    (tmp_path / "reference").mkdir()
    row = "| 404 | `model_not_found` | a meaning \\| by hand |"
    (tmp_path / page).write_text(f"{row}\n| 404 | `no_such_code` | gone |\n")
    assert command.main(["--check", page]) == 1
    assert "scripts/reference" in capsys.readouterr().err
    assert command.main([page]) == 0
    written = (tmp_path / page).read_text()
    assert row in written
    assert "no_such_code" not in written
    assert written.count("\n") == here.count("\n")


def test_every_code_of_an_engine_and_of_the_scheduler_is_an_error() -> None:
    found = errors.found()
    assert {("502", "prefill_server_error"), ("413", "decode_answer_too_large")} <= found
    assert {("400", "unreadable_body"), ("503", "no_decode_servers")} <= found
    assert {("400", "trial_refused"), ("417", "expectation_failed")} <= found


def test_a_route_without_a_description_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {
        name: endpoint for name, endpoint in http_api.ENDPOINTS.items() if name != "PUT /policy"
    }
    monkeypatch.setattr(http_api, "ENDPOINTS", fewer)
    http_api.endpoints.cache_clear()
    with pytest.raises(ValueError, match="PUT /policy"):
        http_api.endpoints()


def test_the_document_names_keys_and_bodies() -> None:
    document = json.loads((pages.DOCS / "reference" / "openapi.json").read_text())
    paths = document["paths"]
    assert paths["/workers"]["post"]["security"] == [{"admin": []}]
    assert paths["/health"]["get"]["security"] == []
    assert paths["/workers/{worker_id}"]["get"]["parameters"][0]["name"] == "worker_id"
    body = paths["/workers"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["url", "worker_type"]


def test_every_verb_and_its_flags_are_in_the_reference() -> None:
    page = (pages.DOCS / "reference" / "commands.md").read_text()
    for verb in VERBS.keys() - {"router", "scheduler"}:
        section = page.partition(f"\n## {verb}\n")[2].partition("\n## ")[0]
        flags = [
            flag
            for action in commands._shown(commands.parser_of([verb])._actions)
            for flag in action.option_strings
            if not flag.startswith("--router-") and flag not in ("-h", "--help")
        ]
        assert [flag for flag in flags if f"`{flag}" not in section] == [], verb


@pytest.mark.parametrize("page", ["commands.md", "router-flags.md"])
def test_every_flag_has_a_meaning_and_no_mark_of_argparse(page: str) -> None:
    text = (pages.DOCS / "reference" / page).read_text()
    meanings = re.findall(r"^\| `-.*\| (.*?) ?\|$", text, re.MULTILINE)
    assert len(meanings) > 50
    assert [meaning for meaning in meanings if not meaning or meaning[0] in ";(|"] == []
    assert "%%" not in text
