"""SGLang's own argument parser, in a process of its own that has what SGLang imports.

Owns that process. Run as a program it reads a JSON list of words per line and answers with a JSON
string per line: empty if SGLang takes the words, else what it says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from tools.cpu_engine.environment import cpu_engine_environment


def is_installed() -> bool:
    """Whether there is an SGLang to ask."""
    return importlib.util.find_spec("sglang") is not None


def refusal(words: Sequence[str]) -> str:
    """Return the objection of ``python -m sglang.launch_server`` to these words; empty: there is
    none."""
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(list(words)) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "SGLang's parser could not be started: see standard error"
    return str(json.loads(answer))


@cache
def _process() -> subprocess.Popen[str]:
    """Ends when this process does, by the end of its input."""
    return subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, **cpu_engine_environment(1, inherited=os.environ)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _answer_all() -> None:
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # importing SGLang prints
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser(prog="python -m sglang.launch_server")
        ServerArgs.add_cli_args(parser)
    for line in sys.stdin:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(json.loads(line))
            text = ""
        except SystemExit:
            text = said.getvalue().strip().splitlines()[-1]
        print(json.dumps(text), file=out, flush=True)


if __name__ == "__main__":
    _answer_all()
