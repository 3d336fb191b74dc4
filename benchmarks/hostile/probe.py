"""Sends a router the same small chat over and over.

``python -m benchmarks.hostile.probe PORT [tls] [reconnects]``: over TLS, on a connection for each
request.

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

from benchmarks.hostile.case import tls_context

_PAUSE_S = 0.005
_ANSWER_S = 120.0
_BODY = orjson.dumps({"messages": [{"role": "user", "content": "A fair question. " * 40}]})


def ask(port: int, *, tls: bool, reconnects: bool) -> None:
    connection: http.client.HTTPConnection
    if tls:
        context = tls_context()
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=_ANSWER_S, context=context
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        asked_s = time.monotonic()
        try:
            connection.request("POST", "/v1/chat/completions", _BODY)
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException):
            status = 0
        if reconnects or not status:
            connection.close()
        print(asked_s, time.monotonic() - asked_s, status, flush=True)


if __name__ == "__main__":
    ask(int(sys.argv[1]), tls="tls" in sys.argv, reconnects="reconnects" in sys.argv)
