"""The README as a package index shows it: no link there may be relative."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import pytest
from packaging_sources import ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
BASE = "https://host/owner/name"
README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def index_page() -> Callable[[str, str], str]:
    spec = importlib.util.spec_from_file_location("the_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.index_page


def test_every_link_leads_to_a_file_of_the_repository(
    index_page: Callable[[str, str], str],
) -> None:
    links = LINK.findall(index_page(README, BASE + "/"))
    ours = [link for link in links if link.startswith(BASE)]
    assert len(ours) > 10
    assert all(link.startswith("https://") for link in links)
    for link in ours:
        kind, branch, path = link.removeprefix(BASE + "/").split("/", 2)
        assert branch == "main"
        assert (ROOT / path.partition("#")[0]).exists(), link
        assert (kind == "raw") == path.endswith(".png"), link


def test_without_an_address_the_words_stay_and_no_dead_link(
    index_page: Callable[[str, str], str],
) -> None:
    page = index_page(README, "")
    assert all(link.startswith("https://") for link in LINK.findall(page))
    assert "![" not in page
    assert "how SBS works" in page
