"""Forks nurseries, for tests: they start twenty clusters, and importing SGLang takes seven seconds.

`python -m tools.cpu_engine.nurseries SOCKET` imports it once and listens there until its parent
ends. A nursery whose environment names the socket is forked from this process, with the pipes and
the environment it was started with.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from sglang_sbs.cluster.spawn import die_with_parent
from tools.cpu_engine import nursery


def main(path: str) -> None:
    die_with_parent(signal.SIGTERM)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen()
    nursery.preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended nurseries leave no zombies
    while True:
        asked, _ = listening.accept()
        message, pipes, *_ = socket.recv_fds(asked, 1 << 20, 3)
        if os.fork() == 0:
            break
        for descriptor in (asked.detach(), *pipes):
            os.close(descriptor)
    listening.close()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for pipe, target in zip(pipes, (0, 1, 2), strict=True):
        os.dup2(pipe, target)
        os.close(pipe)
    os.environ.clear()
    os.environ.update(json.loads(message))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    request = nursery.serve()
    if request is None:
        asked.send(b"0")
        return
    asked.close()
    nursery.run_engine(request)


if __name__ == "__main__":
    main(sys.argv[1])
