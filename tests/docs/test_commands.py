"""Every command in the documentation is understood by what it calls."""

from __future__ import annotations

import re

import aiohttp
import pytest
from command_checks import Wrong, check, curl_requests
from doc_commands import ROOT, Command, commands_of, pages

from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.server import RouterServer
from sglang_sbs.simulator.cli import main as simulate

DOCUMENTED = [
    command
    for page in pages()
    for command in commands_of(page.read_text(), str(page.relative_to(ROOT)))
]
CURLS = [command for command in DOCUMENTED if command.words[:1] == ("curl",)]


@pytest.mark.parametrize("command", DOCUMENTED, ids=str)
@pytest.mark.usefixtures("readers_folder")
def test_a_documented_command_is_understood(command: Command) -> None:
    assert mistake_in(command) == ""


def mistake_in(command: Command) -> str:
    """The error of the check; empty if the command is understood."""
    try:
        check(command)
    except Wrong as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "text",
    [
        "sglang-sbs simulate paper-3k --no-such-flag 1",
        "sglang-sbs simulate paper-3k --policies sbs,no_such_policy",
        "sglang-sbs no-such-verb",
        "python -m sglang_sbs.launch_router --prefill http://p0:1 --decode http://d0:1 --sbs-x 1",
        "python -m sglang_sbs.launch_router --prefill http://p0:1 --policy sbs",
        "python -m sglang_sbs.launch_router --prefill http://p:1 --decode http://d:1 --dp-aware",
        "python -m sglang_sbs.launch_server --model-path M --no-such-flag",
        "python -m sglang.launch_server --model-path M --no-such-flag",
        "python -m sglang_router.launch_router --policy sbs",
        "scripts/no-such-script",
        "scripts/demo --no-such-flag",
        "scripts/install --no-such-flag",
        "scripts/bench-decisions --no-such-flag",
        "scripts/bench-relay --no-such-flag",
        "scripts/test tests/no-such-file.py",
        "pip install no-such-package",
        "pip install sglang-sbs",
        "pip install 'sglang-sbs[no-such-extra]'",
        "curl http://router:29000/workers",
        "export SGLANG_SBS_NO_SUCH=1",
        "SGLANG_SBS_NO_SUCH=1 scripts/check",
        "docker compose -f no-such-file.yaml up",
        "no-such-program",
    ],
)
@pytest.mark.usefixtures("readers_folder")
def test_a_wrong_command_would_be_noticed(text: str) -> None:
    (command,) = commands_of(f"```bash\n{text}\n```", "page")
    with pytest.raises(Wrong):
        check(command)


async def test_every_documented_curl_has_an_endpoint() -> None:
    """Asked of a router without workers: anything but 404 and 405 is an endpoint's own answer."""
    ports = ["--port", "0", "--prometheus-port", "0", "--host", "127.0.0.1"]
    workers = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
    server = RouterServer(parse_flags([*workers, *ports, "--sbs-endforward-bind", "none"]))
    await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:

            async def status(path: str, to_metrics: bool = False, method: str = "GET") -> int:
                port = server.prometheus_port if to_metrics else server.port
                url = f"http://127.0.0.1:{port}{path}"
                async with http.request(method, url) as response:
                    return response.status

            assert await status("/no-such-path") == 404
            unknown = [
                str(command)
                for command in CURLS
                for request in curl_requests(command.words[1:])
                if await status(request.path, request.to_metrics, request.method) in (404, 405)
            ]
    finally:
        await server.stop()
    assert unknown == []


QUICK = [
    command
    for command in DOCUMENTED
    if command.words[:2] == ("sglang-sbs", "simulate")
    and command.words[2].startswith(("paper-3k", "paper-long", "sessions", "trace:requests"))
    and "--max-qps" not in command.words
    and command.page in ("docs/tuning.md", "docs/troubleshooting.md")
]


@pytest.mark.parametrize("command", QUICK, ids=str)
@pytest.mark.usefixtures("readers_folder")
def test_a_simulation_of_the_guides_runs(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs as written, but short and at little load."""
    short = ["--duration", "21", "--loads", "0.05", "--workers", "1"]
    assert simulate([*command.words[2:], *short]) == 0
    assert "load 0.05" in capsys.readouterr().out


def test_the_quick_start_is_about_one_cluster() -> None:
    """Whoever compares policies as it says compares them on the same engines."""
    clusters = {
        tuple(word for word in command.words if word.startswith(("http://p", "http://d")))
        for command in DOCUMENTED
        if command.page == "docs/quick-start.md" and "--prefill" in command.words
    }
    assert len(clusters) == 1, clusters


def test_commands_are_read_as_a_shell_does() -> None:
    page = """
text with `scripts/not-a-command`

```python
not_a_command
```

   ```bash
   # a comment with a quote's end
   A=1 first 'a b' \\
       --flag "c # d"   # a comment's quote
   one | two && three 2>err.log > out.log; four ...
   cat > file <<EOF
   not a command
   EOF
   five '{"a":
     1}'
   ```
"""
    commands = commands_of(page, "page")
    assert [command.words for command in commands] == [
        ("first", "a b", "--flag", "c # d"),
        ("one",),
        ("two",),
        ("three",),
        ("four",),
        ("cat",),
        ("five", '{"a":\n  1}'),
    ]
    assert commands[0].environment == {"A": "1"}
    assert [command.abbreviated for command in commands] == [False] * 4 + [True] + [False] * 2
    assert commands[0].line == 10


def test_a_quote_that_is_left_open_is_an_error() -> None:
    with pytest.raises(ValueError, match="page:2: a quote or a line is left open"):
        commands_of("```bash\necho 'a\n```", "page")


def test_nothing_asks_an_index_for_this_project() -> None:
    """It is on none, so that whoever took the name there could have his code run. With an extra it
    is a hint to who has it installed: pip then gets what the extra names only."""
    asks = re.compile(r"""pip install[\s"']*(?:--\S+\s+)*sglang[-_]sbs(?![\w\[]|-\*\.whl)""")
    assert asks.search('"pip install "\n    "sglang-sbs next to"')
    assert not asks.search("pip install 'sglang-sbs[jwt]', pip install sglang_sbs-*.whl")
    folders = ("docs", "examples", "patches", "scripts", "sglang_sbs")
    files = [ROOT / "README.md", ROOT / "Dockerfile", ROOT / "CONTRIBUTING.md"]
    files += [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    texts = {file: file.read_bytes().decode("utf-8", "replace") for file in files}
    assert [file for file, text in texts.items() if asks.search(text)] == []
