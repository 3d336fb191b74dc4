"""One process that has imported SGLang and forks engines on request.

Its client is `engines.py`. Importing SGLang takes seconds and half a gigabyte per
process; engines of one machine forked from here share both. Only for CPU engines: a CUDA context
would not survive the fork, and all engines of a nursery start from its environment.

Protocol, one JSON object a line. On stdin `{"name", "argv", "environment", "log_path"}`, where
`argv` is a module name and its arguments. On stdout `{"event": "ready"}` once, then for each engine
`{"event": "started", "name", "pid"}` and `{"event": "exited", "name", "returncode"}`. An engine
leads its own process group. End of stdin ends the nursery, whose engines get SIGTERM then.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sglang_sbs.cluster.spawn import die_with_parent

PRELOADED_MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.disaggregation.mooncake.conn",
)
STOP_GRACE_S = 10.0
NURSERIES = "CPU_ENGINE_NURSERIES"
"""Environment variable: the socket of `nurseries.py`, from which nurseries are forked."""


@dataclass(frozen=True)
class EngineRequest:
    """An engine to fork: module and arguments, whole environment, file for its output."""

    name: str
    argv: list[str]
    environment: dict[str, str]
    log_path: str


def preload() -> None:
    """Import what every engine process needs, and keep the garbage collector off those objects."""
    for module in PRELOADED_MODULES:
        import_module(module)
    from setproctitle import getproctitle
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()
    # It finds the memory of the process title from the environment, which engines replace.
    getproctitle()
    gc.collect()
    gc.freeze()


def serve() -> EngineRequest | None:
    """Fork engines until stdin ends.

    Returns None in the nursery itself and, in each forked engine, the request it shall run.
    """
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    engines: dict[int, tuple[str, int]] = {}  # pidfd -> (name, pid)
    pending = b""
    _send({"event": "ready"})
    while True:
        for key, _events in selector.select():
            if key.fd in engines:
                name, pid = engines.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _send({"event": "exited", "name": name, "returncode": code})
                continue
            received = os.read(key.fd, 1 << 16)
            if not received:
                _stop(engines)
                return None
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                request = EngineRequest(**json.loads(line))
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for pidfd in engines:
                        os.close(pidfd)
                    return request
                pidfd = os.pidfd_open(pid)
                engines[pidfd] = (request.name, pid)
                selector.register(pidfd, selectors.EVENT_READ)
                _send({"event": "started", "name": request.name, "pid": pid})


def run_engine(request: EngineRequest) -> None:
    """Become the engine: own process group, output to its log, `python -m` semantics."""
    os.setpgid(0, 0)
    die_with_parent(signal.SIGTERM)
    devnull = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((devnull, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(devnull)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request.environment)
    module, *arguments = request.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _send(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _stop(engines: dict[int, tuple[str, int]]) -> None:
    """SIGTERM to every engine, SIGKILL to the groups of those that outlive the grace period."""
    for _name, pid in engines.values():
        os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_GRACE_S
    for _name, pid in engines.values():
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline_s:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.05)


def fork_of(path: str) -> int:
    """Have a nursery forked in place of this process; its exit code when it has ended. Raises:
    OSError, the socket is closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect(path)
        socket.send_fds(asked, [json.dumps(dict(os.environ)).encode()], [0, 1, 2])
        return 0 if asked.recv(1) else 1


def main() -> None:
    if sys.stdin.isatty():
        sys.exit(f"{Path(__file__).stem} is started by sglang_sbs.cluster, not by hand")
    # Ctrl-C goes to the supervisor, which ends this process by closing stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if NURSERIES in os.environ:
        sys.exit(fork_of(os.environ[NURSERIES]))
    # What imports print must not mix with the protocol on stdout.
    protocol = os.dup(1)
    os.dup2(2, 1)
    preload()
    os.dup2(protocol, 1)
    os.close(protocol)
    request = serve()
    if request is not None:
        run_engine(request)


if __name__ == "__main__":
    main()
