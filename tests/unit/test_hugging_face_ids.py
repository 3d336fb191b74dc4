"""A model named by its Hugging Face id: the router counts with its tokenizer, or says why not.

The real ``huggingface_hub`` asks a hub on loopback, in processes of their own, as it reads its
variables when it is imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, fake_hub

from tools.cpu_engine.tiny_model import cached_tiny_model

WORKERS = ("--prefill", "http://127.0.0.1:9", "9000", "--decode", "http://127.0.0.1:10")
LOOPBACK = ("--host", "127.0.0.1", "--port", "0", "--prometheus-host", "127.0.0.1")
LIMIT_S = 120


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    slow = tmp_path / "slow"
    shutil.copytree(cached_tiny_model(), slow)
    (slow / "tokenizer.json").unlink()
    with fake_hub({"org/tiny": cached_tiny_model(), "org/slow": slow}) as hub:
        yield hub


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    return os.environ | settings


def dry_run(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "sglang_sbs.launch_server", "--dry-run", *flags)
    return subprocess.run(
        words, env=environment, text=True, capture_output=True, timeout=LIMIT_S, check=False
    )


def serves(environment: dict[str, str], *flags: str) -> None:
    """Start a router and end it once it says that it serves."""
    words = (sys.executable, "-m", "sglang_sbs.launch_router", *WORKERS, *LOOPBACK, *flags)
    more = ("--prometheus-port", "0", "--sbs-endforward-bind", "none")
    with subprocess.Popen(
        [*words, *more], env=environment, text=True, stderr=subprocess.PIPE
    ) as router:
        assert router.stderr is not None
        said = []
        for line in router.stderr:
            said.append(line)
            if "sglang-sbs" in line and "policy" in line:
                router.terminate()
        assert router.wait(LIMIT_S) == 0, "".join(said)


def test_a_model_on_the_hub_is_the_routers_tokenizer(
    hub: FakeHub, environment: dict[str, str]
) -> None:
    done = dry_run(environment, "--model-path", "org/tiny")
    assert done.returncode == 0, done.stderr
    assert "--tokenizer-path org/tiny" in done.stdout.splitlines()[-1]
    assert "estimate" not in done.stderr
    assert set(hub.asked_for) == {"tokenizer.json", "tokenizer_config.json"}, "and no weights"


@pytest.mark.parametrize(
    ("model", "reason"), [("org/slow", "no tokenizer.json"), ("org/missing", "Hugging Face")]
)
def test_a_model_without_a_usable_tokenizer_is_reported_and_left_out(
    model: str, reason: str, environment: dict[str, str]
) -> None:
    done = dry_run(environment, "--model-path", model)
    assert done.returncode == 0
    assert "--tokenizer-path" not in done.stdout
    assert re.search(f"the router will estimate prompt lengths: .*{reason}", done.stderr)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--router-tokenizer-path", "org/missing"), "--tokenizer-path org/missing: no such fol"),
        (("--router-tokenizer-path", "/no/where"), "--tokenizer-path /no/where: no such folder"),
        (("--router-tokenizer-path", "org/slow"), "no tokenizer.json"),
        (("--router-chat-template", "/no/where"), "--chat-template: .*/no/where"),
        (("--router-policyy", "sbs"), "unknown flag --policyy; did you mean --policy?"),
    ],
)
def test_what_the_router_cannot_use_is_refused_before_an_engine_starts(
    flags: tuple[str, ...], complaint: str, environment: dict[str, str]
) -> None:
    done = dry_run(environment, "--model-path", "org/tiny", *flags)
    assert done.returncode == 2
    assert re.search(complaint, done.stderr)
    assert done.stdout == ""


def test_the_engines_tokenizer_is_the_routers_too(environment: dict[str, str]) -> None:
    done = dry_run(environment, "--model-path", "org/slow", "--tokenizer-path", "org/tiny")
    prefill, decode, router = (line for line in done.stdout.splitlines() if line and line[0] != "#")
    assert all("--tokenizer-path org/tiny" in line for line in (prefill, decode, router))


def test_a_router_serves_with_an_id_and_again_without_the_hub(
    hub: FakeHub, environment: dict[str, str]
) -> None:
    serves(environment, "--tokenizer-path", "org/tiny")
    hub.models = {}
    serves(environment, "--tokenizer-path", "org/tiny", "--workers", "2")
    assert hub.asked_for.count("tokenizer.json") == 1


def test_a_router_says_which_flag_names_no_model(environment: dict[str, str]) -> None:
    words = (sys.executable, "-m", "sglang_sbs.launch_router", *WORKERS, *LOOPBACK)
    done = subprocess.run(
        [*words, "--tokenizer-path", "org/missing"],
        env=environment,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "--tokenizer-path org/missing: no such folder" in done.stderr
    assert "Traceback" not in done.stderr
