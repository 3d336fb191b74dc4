"""Whether a documented command would be understood, asked of what it calls.

Owns how each program's real argument parser is reached, and the short list of programs that are
not ours. Parsing happens in the current folder: files that commands name must be there. Must not
know where commands come from.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import sglang_parser
from doc_commands import ROOT, Command

from sglang_sbs.cli import VERBS
from sglang_sbs.launch_server import plan_from_command_line
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.sources import VARIABLES
from sglang_sbs.router.options.stock import IGNORED_FLAGS

NOT_OURS = {
    "git": "only clone, whose address is the reader's",
    "cd": "a folder of the reader's",
    "chmod": "a file that the command before it made",
    "openssl": "only rand -hex, for secrets",
    "export": "",
    "docker": "not installed in tests; the files it names must exist",
    "kubectl": "not installed in tests; the files it names must exist",
    "jq": "reads the JSON of the command before it",
    "bash": "a script of this repository; it must exist",
    "source": "a file of this repository; it must exist",
    "shellcheck": "files of this repository; they must exist",
}
"""Programs that are not parsed by their own parser, and why that is all right."""
PACKAGES_OF_OTHERS = {
    "smg": "a router that scripts/compare-routers can compare with; optional",
    "ai-dynamo-runtime": "another, as a library",
    "sglang": "the engine",
}
METRICS_PORTS = range(29000, 29200)
_CURL = argparse.ArgumentParser(prog="curl", add_help=False)
_CURL.add_argument("urls", nargs="+")
_CURL.add_argument("-X", "--request")
_CURL.add_argument("-H", "--header", action="append")
_CURL.add_argument("-d", "--data", help="JSON")
for _flag in ("-s", "-S", "-f", "-N", "-i", "-sS", "-fsS"):
    _CURL.add_argument(_flag, action="store_true")


class Wrong(AssertionError):
    """The command would be refused; the message says by whom and why."""


class _ParsedError(BaseException):
    """Raised in place of doing what was asked for; no ``except Exception`` may catch it."""


def check(command: Command) -> None:
    """Raises: Wrong."""
    for name in command.environment:
        _check_variable(name)
    if not command.words:
        return
    program, *rest = command.words
    if program.startswith(("scripts/", "./scripts/")):
        _check_script(program.removeprefix("./"), rest)
    elif program.startswith("examples/") or program.startswith("./examples/"):
        _must_exist(program)
    elif program in ("sglang-sbs", ".venv/bin/sglang-sbs"):
        _check_verb(rest, command)
    elif re.fullmatch(r"(\.venv/bin/)?python3?", program):
        if rest[:1] != ["-m"]:
            raise Wrong(f"{command}: write python -m MODULE")
        _check_module(rest[1], rest[2:], command)
    elif program == "sglang" and rest[2:4] == ["--model-type", "sbs"]:
        _check_server(["--model-path", rest[1], *rest[4:]], command)  # serve MODEL
    elif program == "pytest":
        _check_pytest(rest)
    elif program in ("pip", ".venv/bin/pip"):
        _check_pip(rest)
    elif program == "curl":
        curl_requests(rest)
    elif program in NOT_OURS:
        _check_other(program, rest)
    else:
        raise Wrong(f"{command}: {program!r} is no program of ours, nor in NOT_OURS")


# Ours ---------------------------------------------------------------------------------------------


def _check_verb(words: Sequence[str], command: Command) -> None:
    if not words:
        raise Wrong(f"{command}: a verb is missing")
    if words[0] == "--version":
        return
    if words[0] not in VERBS:
        raise Wrong(f"{command}: no verb {words[0]!r}")
    _check_module(VERBS[words[0]].module, words[1:], command)


def _check_module(module: str, words: Sequence[str], command: Command) -> None:
    special: dict[str, Callable[[Sequence[str], Command], None]] = {
        "sglang_sbs.launch_router": _check_router,
        "sglang_sbs.launch_scheduler": _check_scheduler,
        "sglang_sbs.launch_server": _check_server,
        "sglang_sbs.simulator.cli": _check_simulate,
        "sglang.launch_server": _check_sglang,
        "sglang_router.launch_router": _check_stock_router,
    }
    if module in special:
        special[module](words, command)
    elif module == "pytest":
        _check_pytest(words)
    elif module.startswith(("sglang_sbs.", "benchmarks.", "tools.")):
        main = import_module(module).main
        _parses(lambda: main(list(words)), command)
    else:
        raise Wrong(f"{command}: {module} is not a module of ours")


def _check_router(words: Sequence[str], command: Command) -> None:
    try:
        options = parse_flags(words)
    except FlagError as error:
        raise Wrong(f"{command}: {error}") from None
    found = bool(options.prefill and options.decode) or options.role == "front-end"
    if not (found or command.abbreviated or "--service-discovery" in words):
        raise Wrong(f"{command}: no --prefill or no --decode")
    for word in words:
        name = word.partition("=")[0].removeprefix("--").removeprefix("router-")
        if word.startswith("--") and name in IGNORED_FLAGS:
            raise Wrong(f"{command}: {word} has no effect: {IGNORED_FLAGS[name]}")


def _check_scheduler(words: Sequence[str], command: Command) -> None:
    _check_router(["--sbs-role", "scheduler", *words], command)


def _check_server(words: Sequence[str], command: Command) -> None:
    more = ["--model-path", "MODEL"] if command.abbreviated else []
    with _exits_are_wrong(command):
        plan, *_ = plan_from_command_line([*map(_substituted, words), *more, "--dry-run"])
    for instance in plan.instances:
        _check_sglang(instance.argv[3:], command)
    if plan.router is not None:
        _check_router(plan.router.argv[3:], command)


def _substituted(word: str) -> str:
    """Return the word with ``$(cat FILE)`` replaced, as a shell does."""
    return re.sub(r"\$\(cat ([\w.-]+)\)", lambda cat: Path(cat[1]).read_text(), word)


def _check_simulate(words: Sequence[str], command: Command) -> None:
    """Run all checks that come before the first simulation."""
    modules = [
        import_module(f"sglang_sbs.simulator.{name}")
        for name in ("cli", *(f"experiments.{x}" for x in ("plan", "trials")))
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name in ("run_with_progress", "replay"):
                if hasattr(module, name):
                    patch.setattr(module, name, _stop)
        with _exits_are_wrong(command):
            try:
                code = import_module("sglang_sbs.simulator.cli").main(list(words))
            except _ParsedError:
                return
    raise Wrong(f"{command}: it ended with {code} before it simulated anything")


def _check_script(name: str, words: Sequence[str]) -> None:
    path = ROOT / name
    if not os.access(path, os.X_OK):
        raise Wrong(f"{name}: there is no such script, or it is not executable")
    first, *_, last = path.read_text().strip().splitlines()
    command = Command(name, 0, {}, (name, *words), abbreviated=False)
    if "python" in first:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(path), *words])
            patch.setattr(sys, "path", list(sys.path))
            patch.setattr(os, "execv", _stop)
            _parses(lambda: runpy.run_path(str(path), run_name="__main__"), command)
        return
    if last.startswith("exec ") and last.endswith('"$@"'):
        check(Command(name, 0, {}, (*shlex.split(last)[1:-1], *words), abbreviated=False))
        return
    known = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", path.read_text())
    for word in words:
        if word.startswith("-") and word not in known:
            raise Wrong(f"{command}: it has no option {word}")


def _parses(run: Callable[[], Any], command: Command) -> None:
    """Run a program up to the end of its parser: the real one, of the real program."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(parser, *args, **kwargs)
        raise _ParsedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with _exits_are_wrong(command):
            try:
                run()
            except _ParsedError:
                return
    raise Wrong(f"{command}: its main() does not parse arguments with argparse")


@contextmanager
def _exits_are_wrong(command: Command) -> Iterator[None]:
    """argparse says what is wrong on standard error and exits."""
    try:
        yield
    except SystemExit as ended:
        raise Wrong(
            f"{command}: refused with exit code {ended.code} (see standard error)"
        ) from None


def _stop(*_args: object, **_kwargs: object) -> None:
    raise _ParsedError


# Others -------------------------------------------------------------------------------------------


def _check_sglang(words: Sequence[str], command: Command) -> None:
    if not sglang_parser.is_installed():
        pytest.skip("SGLang is not installed (scripts/install --router-only)")
    more = ["--model-path", "MODEL"] if command.abbreviated else []
    if refusal := sglang_parser.refusal([*words, *more]):
        raise Wrong(f"{command}: {refusal}")
    if "--kv-events-config" in words:
        json.loads(words[words.index("--kv-events-config") + 1])


def _check_stock_router(words: Sequence[str], command: Command) -> None:
    router_args = pytest.importorskip("sglang_router.router_args")
    parser = argparse.ArgumentParser(prog="python -m sglang_router.launch_router")
    router_args.RouterArgs.add_cli_args(parser, use_router_prefix=False, exclude_host_port=False)
    if "sbs" in words:
        raise Wrong(f"{command}: sglang_router has no policy sbs without the patch")
    with _exits_are_wrong(command):
        parser.parse_args(list(words))


def _check_pytest(words: Sequence[str]) -> None:
    value = False
    for word in words:
        if value:
            value = False
        elif word in ("-m", "-k", "-n", "--dist"):
            value = True
        elif not word.startswith("-"):
            _must_exist(word.partition("::")[0])


def _check_pip(words: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if not words or words[0] != "install":
        raise Wrong(f"pip {shlex.join(words)}: only install")
    for word in words[1:]:
        if word.startswith("./"):
            _must_exist(f"{word}/pyproject.toml")
            continue
        name = re.fullmatch(r"([\w-]+|\.)(?:\[([\w,-]+)\])?(?:[=<>]=[\w.]+)?", word)
        if name is not None and name[1] in PACKAGES_OF_OTHERS:
            continue
        if name is None or name[1] not in (project["name"], "."):
            raise Wrong(f"pip install {word}: not this project")
        if name[1] == project["name"] and not name[2]:
            raise Wrong(f"pip install {word}: it is on no index; in a checkout: pip install .")
        for extra in (name[2] or "").split(","):
            if extra and extra not in project["optional-dependencies"]:
                raise Wrong(f"pip install {word}: there is no extra {extra!r}")


@dataclass(frozen=True)
class CurlRequest:
    """The request of a documented curl."""

    method: str
    path: str
    headers: dict[str, str]
    data: str | None
    to_metrics: bool


def curl_requests(words: Sequence[str]) -> list[CurlRequest]:
    """One per URL of a curl command without its first word. Raises: Wrong."""
    try:
        args = _CURL.parse_args(list(words))
    except SystemExit:
        raise Wrong(f"curl {shlex.join(words)}: an option this test does not know") from None
    if args.data is not None:
        json.loads(args.data)
    method = args.request or ("GET" if args.data is None else "POST")
    headers = dict(header.split(": ", 1) for header in args.header or ())
    requests = []
    for url in args.urls:
        parts = urlsplit(url)
        to_metrics = parts.port in METRICS_PORTS
        if to_metrics and (method, parts.path) != ("GET", "/metrics"):
            raise Wrong(f"curl {url}: the metrics port has GET /metrics only")
        requests.append(CurlRequest(method, parts.path, headers, args.data, to_metrics))
    return requests


def _check_other(program: str, words: Sequence[str]) -> None:
    if program == "git" and words[0] != "clone":
        raise Wrong(f"git {words[0]}: only clone is on the list")
    if program == "openssl" and list(words[:2]) != ["rand", "-hex"]:
        raise Wrong(f"openssl {words[0]}: only rand -hex is on the list")
    if program == "export":
        for word in words:
            _check_variable(word.partition("=")[0])
    if program in ("bash", "source", "shellcheck"):
        for word in words:
            if not word.startswith("-"):
                _must_exist(word)
    if program in ("docker", "kubectl"):
        for flag, value in itertools.pairwise(words):
            if flag in ("-f", "-k", "--file", "--filename") and "://" not in value:
                _must_exist(value)


@cache
def our_variables() -> frozenset[str]:
    """Environment variables that this project reads, by their names in its source."""
    name = re.compile(r"\"(SGLANG_SBS_[A-Z_]+)\"")
    sources = (ROOT / "sglang_sbs").rglob("*.py")
    written = {found for path in sources for found in name.findall(path.read_text())}
    return frozenset(written | VARIABLES.keys())


def _check_variable(name: str) -> None:
    if name.startswith("SGLANG_SBS") and name not in our_variables():
        raise Wrong(f"nothing here reads a variable {name}")


def _must_exist(path: str) -> None:
    if not (ROOT / path).exists():
        raise Wrong(f"{path}: there is no such file in the repository")
