"""``python -m sglang_sbs.launch_router``: the router's entry point.

Owns the process: arguments, logging, signals, exit code. Must not know the parts of the router.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop

from sglang_sbs import __version__
from sglang_sbs.router.arguments import FlagError
from sglang_sbs.router.flags import RouterOptions, parse_flags
from sglang_sbs.router.server import RouterServer

logger = logging.getLogger("sglang_sbs.router")

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING}


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a router until SIGTERM or SIGINT. Returns the exit code."""
    try:
        options = parse_flags(sys.argv[1:] if argv is None else argv, prog)
        if not options.prefill or not options.decode:
            raise FlagError(
                "no workers: give at least one --prefill URL [BOOTSTRAP_PORT] and one --decode URL"
            )
    except FlagError as error:
        print(f"launch_router: {error}", file=sys.stderr)
        return 2
    _set_up_logging(options)
    for warning in options.warnings:
        logger.warning("%s", warning)
    try:
        return uvloop.run(serve(options))
    except (OSError, ValueError) as error:
        logger.error("cannot start: %s", error)
        return 1


async def serve(options: RouterOptions) -> int:
    """Serve until a signal; a second one ends at once. Raises: OSError, ValueError."""
    server = RouterServer(options)
    await server.start()
    logger.info(
        "sglang-sbs %s: policy %s at %s:%d, metrics at :%d, EndForward at %s",
        __version__,
        options.scheduler.policy,
        options.host,
        server.port,
        server.prometheus_port,
        server.endforward_endpoint or "nothing",
    )
    # What start-up made lives for ever: out of the collector's way, and passes less often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await stopping.wait()
    stopping.clear()
    stop = asyncio.create_task(server.stop())
    again = asyncio.create_task(stopping.wait())
    logger.info("stopping: %d requests in flight", server.in_flight.client_requests)
    await asyncio.wait({stop, again}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        stop.cancel()
        await asyncio.gather(stop, return_exceptions=True)
        return 1
    again.cancel()
    return 0


def _set_up_logging(options: RouterOptions) -> None:
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if options.log_dir is not None:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(options.log_dir / "router.log"))
    logging.basicConfig(
        level=_LEVELS.get(options.log_level, logging.ERROR),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=handlers,
        force=True,
    )


if __name__ == "__main__":
    sys.exit(main())
