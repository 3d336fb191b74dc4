"""Command lines of the examples: got by running their scripts, read by who will get them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.router_options import RouterOptions
from tools.cpu_engine.environment import cpu_engine_environment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

ENGINE, ROUTER = "sglang.launch_server", "sglang_sbs.launch_router"

_PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs

def read(argv):
    parser = argparse.ArgumentParser(prog="sglang", exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise SystemExit(f"not known to SGLang: {unknown}")
    return {k: v for k, v in vars(known).items() if isinstance(v, (str, int, float, type(None)))}

def flags():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return [word for action in parser._actions for word in action.option_strings]

answers = sys.stdout
sys.stdout = sys.stderr  # for what imports print
for line in sys.stdin:
    asked = json.loads(line)
    answer = flags() if asked == "flags" else [read(argv) for argv in asked]
    print(json.dumps(answer), file=answers, flush=True)
"""
"""Answers line by line: SGLang takes seconds to import."""

_RESOLVE = """
import json, sys
from sglang.srt.server_args import prepare_server_args
from sglang.srt.arg_groups.overrides import resolved_view

answers = sys.stdout
sys.stdout = sys.stderr
resolved = []
for argv in json.load(sys.stdin):
    arguments = prepare_server_args(argv)
    arguments.resolve_once()
    view = resolved_view(arguments)
    names = ("chunked_prefill_size", "attn_dp_size", "tp_size", "ep_size", "load_balance_method")
    resolved.append({name: getattr(view, name) for name in names})
print(json.dumps(resolved), file=answers)
"""


@dataclass(frozen=True)
class Command:
    """One process: its variables, module and flags, and the comment above it."""

    module: str
    flags: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    title: str = ""


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the examples."""
    return subprocess.run(
        [EXAMPLES / script, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def dry_run(script: str, *arguments: str, **environment: str) -> list[Command]:
    """The commands that a script prints with ``--dry-run``."""
    done = run(script, *arguments, "--dry-run", **environment)
    assert done.returncode == 0, done.stderr
    commands, title = [], ""
    for line in done.stdout.splitlines():
        if line.startswith("#"):
            title = line.removeprefix("#").strip()
        elif line.strip():
            commands.append(command_of(shlex.split(line), title))
    return commands


def command_of(words: Sequence[str], title: str = "") -> Command:
    """``[env] NAME=VALUE ... python -m MODULE FLAGS``."""
    left = list(words)
    if left[0] == "env":
        del left[0]
    environment = {}
    while "=" in left[0] and not left[0].startswith(("-", "/")):
        name, _, value = left.pop(0).partition("=")
        environment[name] = value
    assert left[1] == "-m", left
    return Command(left[2], tuple(left[3:]), environment, title)


def _environment() -> dict[str, str]:
    """Return an environment in which SGLang can be imported here."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_SBS_")}
    return inherited | cpu_engine_environment(1, inherited=inherited) | {"SGLANG_PLUGINS": "none"}


@functools.cache
def _parser() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _PARSE],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process


def read_by_sglang(commands: Sequence[Command]) -> list[dict[str, Any]]:
    """Return the result of the installed SGLang's parser for engines' flags."""
    assert commands and all(command.module == ENGINE for command in commands)
    answer: list[dict[str, Any]] = _ask([command.flags for command in commands])
    return answer


def known_to_sglang() -> set[str]:
    """Every flag of the installed SGLang."""
    return set(_ask("flags"))


def _ask(question: object) -> Any:
    process = _parser()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        _parser.cache_clear()
        raise AssertionError("SGLang's parser refuses: see its message on stderr")
    return json.loads(line)


def resolved_by_sglang(commands: Sequence[Command], *more: str) -> list[dict[str, Any]]:
    """Return the arguments that an engine would run with, after SGLang's own checks of flags
    against each other and against the model's configuration. ``more``: flags in place of a GPU
    machine."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _RESOLVE],
        input=json.dumps([[*command.flags, *more] for command in commands]),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: list[dict[str, Any]] = json.loads(done.stdout)
    return answer


def read_by_router(command: Command) -> RouterOptions:
    """Return the result of our own parser for the router's flags; the files they name must be
    there."""
    assert command.module == ROUTER
    options = parse_flags(command.flags)
    assert not [w for w in options.warnings if "no effect" in w]
    return options


def single(commands: Sequence[Command], module: str) -> Command:
    (found,) = [command for command in commands if command.module == module]
    return found


def engines(commands: Sequence[Command]) -> list[Command]:
    return [command for command in commands if command.module == ENGINE]
