"""The plugin inside SGLang, which publishes one EndForward per forward pass and DP rank.

SGLang (``sglang/srt/plugins/__init__.py``, >= 0.5.11) calls :func:`register` once in every engine
process. It must stay cheap to import: without configuration nothing here loads ZeroMQ or touches
the engine.

``install`` registers the hooks. ``hooks`` decides when to send a message, ``collect`` reads it from
SGLang's objects, ``publish`` sends it. ``gang_hold`` lets a batch start as a whole: DP ranks agree
over ``gang_board`` on one host and ``gang_gather`` on several, the processes of a rank over
``gang_team``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os

logger = logging.getLogger(__name__)

ROUTERS = "SGLANG_SBS_ROUTERS"
BIND = "SGLANG_SBS_BIND"
# SGLang fault: messages-without-rid
HEADER_OVERRIDES = "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"
"""SGLang's switch for ``x-override-rid`` (``entrypoints/request_headers.py``, 0.5.20 on). The
header gives requests of ``/v1/messages`` the router's id, which EndForward and aborts use. A value
that is already set is kept. Clients gain nothing: the router drops such headers, and a client that
reaches an engine can write the same fields into the body of ``/generate``."""


def register() -> None:
    """Hook the engine if ``SGLANG_SBS_ROUTERS`` or ``SGLANG_SBS_BIND`` is set. Never raises: a bad
    value turns the hook off with one log line, and the engine runs unchanged."""
    if not (os.environ.get(ROUTERS, "").strip() or os.environ.get(BIND, "").strip()):
        return
    try:
        from sglang_sbs.engine.config import ConfigError, load_config

        try:
            config = load_config(os.environ)
        except ConfigError as error:
            # Every process of the engine runs this; only the first one logs.
            first = multiprocessing.parent_process() is None
            logger.log(logging.ERROR if first else logging.DEBUG, "EndForward is off: %s", error)
            return
        from sglang_sbs.engine.install import install

        install(config)
        os.environ.setdefault(HEADER_OVERRIDES, "1")
    except Exception:
        logger.exception("EndForward is off: the hook could not be installed")
