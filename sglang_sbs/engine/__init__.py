"""The plugin inside SGLang: publishes one EndForward per forward pass and DP rank.

Owns :func:`register`, the entry point ``sglang.srt.plugins`` of this package, which SGLang
(``sglang/srt/plugins/__init__.py``, >= 0.5.11) calls once in every engine process. Must not know
the router. Must stay cheap to import: without configuration nothing here loads ZeroMQ or touches
the engine.

| module | owns |
|---|---|
| ``config`` | environment variables |
| ``collect`` | reading SGLang's objects, across its versions |
| ``publish`` | the PUB socket, addresses of routers |
| ``hooks`` | when to send what; the hooks themselves |
| ``gang_hold`` | a batch starts as a whole: its requests are held until all can start |
| ``gang_board`` | what the processes of an engine on one host tell each other for that |
| ``gang_gather`` | the same for DP ranks on several hosts |
| ``gang_gate`` | the wait for the rest of a batch where ``gang_hold`` does not work |
| ``install`` | the registration with SGLang, the block in ``/server_info`` |
"""

from __future__ import annotations

import logging
import multiprocessing
import os

logger = logging.getLogger(__name__)

ROUTERS = "SGLANG_SBS_ROUTERS"
BIND = "SGLANG_SBS_BIND"


def register() -> None:
    """Hook the engine if ``SGLANG_SBS_ROUTERS`` or ``SGLANG_SBS_BIND`` is set. Never raises.

    A bad value turns the hook off with one log line; the engine runs on unchanged.
    """
    if not (os.environ.get(ROUTERS, "").strip() or os.environ.get(BIND, "").strip()):
        return
    try:
        from sglang_sbs.engine.config import ConfigError, load_config

        try:
            config = load_config(os.environ)
        except ConfigError as error:
            # Every process of the engine comes here; the first one says it for all.
            first = multiprocessing.parent_process() is None
            logger.log(logging.ERROR if first else logging.DEBUG, "EndForward is off: %s", error)
            return
        from sglang_sbs.engine.install import install

        install(config)
    except Exception:
        logger.exception("EndForward is off: the hook could not be installed")
