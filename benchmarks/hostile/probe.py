"""Asks a router the same small thing over and over: ``python -m benchmarks.hostile.probe PORT``.

A process of its own, so that only the router's delays count. Writes a line per answer: when it was
asked (the clock all processes share), how long it took, both in seconds, and the status. Ends with
its standard input.
"""

from __future__ import annotations

import http.client
import select
import sys
import time

import orjson

_PAUSE_S = 0.005
_ANSWER_S = 120.0
_BODY = orjson.dumps({"messages": [{"role": "user", "content": "A fair question. " * 40}]})


def ask(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        asked_s = time.monotonic()
        try:
            connection.request("POST", "/v1/chat/completions", _BODY)
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        print(asked_s, time.monotonic() - asked_s, status, flush=True)


if __name__ == "__main__":
    ask(int(sys.argv[1]))
