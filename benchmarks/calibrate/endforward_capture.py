"""Listens to EndForward for a while, beside the router or instead of it.

Owns the socket. Must not know what the messages are for. Engines send to every endpoint in their
``SGLANG_SBS_ROUTERS``, so a capture needs nothing from the router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from benchmarks.fitting.captured import Captured
from sglang_sbs.wire import TOPIC, MalformedMessage, decode_endforward
from sglang_sbs.wire.curve import Gatekeeper, keys_in
from sglang_sbs.wire.endforward import FRAMES

_TURN_MS = 200


def capture(
    seconds: float,
    *,
    listen: str | None = None,
    connect: Sequence[str] = (),
    key_file: Path | None = None,
    on_progress: Callable[[float, int], None] = lambda elapsed_s, messages: None,
) -> list[Captured]:
    """Every message of that time; ``on_progress`` about once a second.

    ``listen``: where engines connect to (``SGLANG_SBS_ROUTERS``); ``connect``: publishers that bind
    (``SGLANG_SBS_BIND``).

    Raises:
        OSError: an endpoint cannot be used; the message names it.
        SecretError: the key cannot be used.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gatekeeper = None
    sockets = []
    try:
        keys = None if key_file is None else keys_in(key_file)
        if keys is not None and listen is not None:
            gatekeeper = Gatekeeper(context, keys)
        for endpoint in [*([listen] if listen else []), *connect]:
            sock = context.socket(zmq.SUB)
            sockets.append(sock)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SUBSCRIBE, TOPIC)
            try:
                if endpoint == listen:
                    if keys is not None:
                        keys.serve(sock)
                    sock.bind(endpoint)
                else:
                    if keys is not None:
                        keys.connect(sock)
                    sock.connect(endpoint)
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"{endpoint}: {error.strerror}") from error
        return _until(seconds, sockets, on_progress)
    finally:
        for sock in sockets:
            sock.close(0)
        if gatekeeper is not None:
            gatekeeper.close()
        context.term()


def _until(
    seconds: float,
    sockets: Sequence[zmq.Socket[bytes]],
    on_progress: Callable[[float, int], None],
) -> list[Captured]:
    poller = zmq.Poller()
    for sock in sockets:
        poller.register(sock, zmq.POLLIN)
    messages: list[Captured] = []
    started_s = told_s = time.monotonic()
    while (now_s := time.monotonic()) < started_s + seconds:
        if now_s - told_s > 1:
            told_s = now_s
            on_progress(now_s - started_s, len(messages))
        for sock, _ in poller.poll(_TURN_MS):
            frames = sock.recv_multipart()
            if len(frames) == FRAMES:
                try:
                    messages.append(Captured(time.monotonic(), decode_endforward(frames)))
                except (MalformedMessage, ValueError):
                    continue
    return messages
