"""The router on a machine whose name server does not answer for some names.

``python -m benchmarks.hostile.dark_dns FLAGS``: the router's flags. Lookups of names that end in
``SUFFIX`` block their thread, in Python and in libuv's place.
"""

from __future__ import annotations

import asyncio
import runpy
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop

SUFFIX = ".hangs.test"
_HANG_S = 3600.0
_look_up = socket.getaddrinfo
_libuv = ThreadPoolExecutor(4, thread_name_prefix="libuv")
"""libuv has four threads for all lookups, also of IP addresses."""


def _getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(host, str) and host.endswith(SUFFIX):
        time.sleep(_HANG_S)
    return _look_up(host, *args, **kwargs)


async def _loop_getaddrinfo(
    self: asyncio.AbstractEventLoop, host: Any, port: Any, **kwargs: Any
) -> Any:
    return await self.run_in_executor(_libuv, lambda: _getaddrinfo(host, port, **kwargs))


if __name__ == "__main__":
    socket.getaddrinfo = _getaddrinfo
    uvloop.Loop.getaddrinfo = _loop_getaddrinfo  # type: ignore[assignment]
    # Its modules are imported now and keep the functions they find.
    runpy.run_module("sglang_sbs.launch_router", run_name="__main__", alter_sys=True)
