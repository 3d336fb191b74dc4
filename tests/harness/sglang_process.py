"""Runs a few lines in a Python process that has SGLang and the plugin.

Importing SGLang takes ten seconds, so one process does it and forks for each program. The engine's
own processes have imported it too when they load plugins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from functools import cache
from pathlib import Path
from typing import IO

from tools.cpu_engine.environment import cpu_engine_environment

_IMPORTED = ("sglang.srt.managers.scheduler", "sglang.srt.entrypoints.http_server")
# Replies have a pipe of their own: something that SGLang loads leaves standard output non-blocking.
_NURSERY = """
import importlib, json, logging, os, sys, traceback
replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
for name in sys.argv[2:]:
    importlib.import_module(name)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ.update(job["environ"])
            logging.root.handlers.clear()  # as before an import
            os.dup2(os.open(job["log"], os.O_WRONLY | os.O_CREAT), 2)
            names = {"__name__": "__main__", "json": json, "answer": {}}
            exec(compile(job["program"], "program", "exec"), names)
            with open(job["answer"], "w") as file:
                json.dump(names["answer"], file)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=replies)
"""


@cache
def _nursery() -> tuple[IO[str], IO[str]]:
    """Its input and output. It ends with this process, which holds its input open."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_SBS_")}
    paths = [os.getcwd(), inherited.pop("PYTHONPATH", "")]
    inherited["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    environ = inherited | cpu_engine_environment(1, inherited=inherited)
    # Only the plugins a test names: not the CPU engine's.
    environ.setdefault("SGLANG_PLUGINS", "none")
    replies, end = os.pipe()
    command = [sys.executable, "-W", "ignore", "-c", _NURSERY, str(end), *_IMPORTED]
    started = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, pass_fds=[end], text=True, bufsize=1
    )
    os.close(end)
    assert started.stdin is not None
    return started.stdin, os.fdopen(replies)


def ask(program: str, **extra: str) -> dict[str, object]:
    """Run ``program`` next to SGLang; it fills the dict ``answer``."""
    jobs, replies = _nursery()
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        log.touch()
        job = {"program": textwrap.dedent(program), "environ": extra}
        print(json.dumps(job | {"answer": str(answer), "log": str(log)}), file=jobs)
        assert replies.readline() == "0\n", log.read_text()
        found: dict[str, object] = json.loads(answer.read_text())
        return found | {"log": log.read_text()}
