"""``python -m sglang_sbs.launch_router``: starts the router, handles signals and sets the exit
code. Also the entry points of ``sglang_router`` for starting it from Python."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import uvloop

from sglang_sbs import __version__
from sglang_sbs.console.plain_words import counted, naming_file, plain_error
from sglang_sbs.router.name_lookup import RouterLoop
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.options import parse_flags, read_flags
from sglang_sbs.router.options.router_args import RouterArgs
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.options.shown import shown_config
from sglang_sbs.router.options.sources import Sourced
from sglang_sbs.router.processes.scheduler_process import SchedulerProcess
from sglang_sbs.router.prompts.tokenizer_files import tokenizer_folder
from sglang_sbs.router.server import RouterServer
from sglang_sbs.router.supervision.parent_line import report_to_parent
from sglang_sbs.router.supervision.stop_signals import end_on_signals, one_of
from sglang_sbs.router.supervision.supervisor import Supervisor
from sglang_sbs.router.telemetry.logs import set_up_logging

__all__ = ["Router", "RouterArgs", "launch_router", "main", "parse_router_args"]

logger = logging.getLogger("sglang_sbs.router")


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a router, or one of its processes, until SIGTERM or SIGINT. ``prog`` is its name in
    messages. Returns the exit code: 2 for invalid flags, 1 if it could not start or a second signal
    ended it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options, given = read_flags(arguments, prog)
        if given.args.print_config or given.args.check:
            return _examine(options, given, arguments)
        if options.role != "front-end" and (lacking := options.roles_without_workers):
            raise FlagError(
                f"no {' and no '.join(lacking)} workers: give at least one --prefill URL "
                "[BOOTSTRAP_PORT] and one --decode URL, or --service-discovery with selectors "
                "for both"
            )
    except FlagError as error:
        print(f"{prog or 'launch_router'}: {error}", file=sys.stderr)
        return 2
    # Name the process in the log, because several may share it.
    process, as_json = options.role if options.parent_fd is not None else "", options.log_json
    set_up_logging(options.log_level, as_json=as_json, process=process)
    try:
        if options.log_dir is not None:
            with naming_file("--log-dir", options.log_dir):
                set_up_logging(options.log_level, options.log_dir, as_json=as_json, process=process)
        if options.parent_fd is None:  # child processes do not repeat these messages
            for warning in options.warnings:
                logger.warning("%s", warning)
        if options.tokenizer_path is not None and options.role != "scheduler":
            folder = tokenizer_folder(options.tokenizer_path)
            options = replace(options, tokenizer_path=folder)
            arguments += ["--tokenizer-path", str(folder)]  # child processes need not search again
        several = options.workers > 1 or (options.take_over and options.role != "scheduler")
        if several and options.parent_fd is None:
            return _run(Supervisor(arguments, options).run())
        if options.role == "scheduler":
            return _run(schedule(options))
        return _run(serve(options))
    except (OSError, ValueError) as error:
        logger.error("cannot start: %s", plain_error(error))
        return 1
    except KeyboardInterrupt:
        logger.info("interrupted before it served")
        return 130


def _examine(options: RouterOptions, given: Sourced, arguments: Sequence[str]) -> int:
    """Print a valid command line (``--print-config``), or run the doctor on the engines that it
    names (``--check``). Returns the doctor's exit code; 0 without a pair of engines to examine."""
    for warning in options.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if given.args.print_config:
        print(shown_config(given), end="")
        return 0
    if options.prefill and options.decode:
        from sglang_sbs.doctor.cli import main as examine  # not needed for serving

        return examine([word for word in arguments if word != "--check"])
    print("the flags can be used; they name no pair of engines that could be examined")
    return 0


class Router:
    """A router started from Python, like ``sglang_router.Router``."""

    def __init__(self, args: RouterArgs) -> None:
        """Check the arguments without starting anything. Raises: FlagError, a flag is invalid."""
        self._arguments = args.command_line()
        parse_flags(self._arguments)

    @classmethod
    def from_args(cls, args: RouterArgs) -> Router:
        """Create a router, as ``sglang_router.Router.from_args`` does. Raises: FlagError."""
        return cls(args)

    def start(self) -> None:
        """Run until SIGTERM or SIGINT, in the main thread of a process. Raises: RuntimeError, it
        could not start, or a second signal ended it. The log has the details."""
        code = main(self._arguments)
        if code:
            raise RuntimeError(f"the router ended with exit code {code}: see what it logged")


def launch_router(args: RouterArgs | argparse.Namespace) -> None:
    """Run a router until SIGTERM or SIGINT. Raises: FlagError, a flag is invalid; RuntimeError, it
    could not start, or a second signal ended it."""
    if not isinstance(args, RouterArgs):
        args = RouterArgs.from_cli_args(args)
    Router.from_args(args).start()


def parse_router_args(argv: Sequence[str]) -> RouterArgs:
    """Parse a command line without the program name. Raises: FlagError, a value is malformed;
    SystemExit, after ``--help`` or an error of argparse."""
    parser = argparse.ArgumentParser(prog="launch_router", allow_abbrev=False)
    RouterArgs.add_cli_args(parser)
    return RouterArgs.from_cli_args(parser.parse_args(argv))


def _run(work: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine on a new event loop and return its exit code. SIGINT is blocked until the
    coroutine runs: before that, asyncio would end the loop without ending the task."""

    async def interruptible() -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return await work

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    return uvloop.run(interruptible(), loop_factory=RouterLoop)


async def serve(options: RouterOptions) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code, 1 if a second signal cut
    the draining short. Raises: OSError, a port is in use; ValueError, a file of the options is
    unusable."""
    server = RouterServer(options)
    await server.start()
    stopping = asyncio.Event()
    end_on_signals(stopping)
    if options.parent_fd is not None:  # the supervisor reports it for all
        report_to_parent(options.parent_fd, {}, gone=stopping.set)
    else:
        place = f"policy {options.scheduler.policy} at {options.host}:{server.port}"
        logger.info("sglang-sbs %s: %s, %s", __version__, place, _listens_at(server))
    _settle_memory()
    await stopping.wait()
    stopping.clear()
    stop = asyncio.create_task(server.stop())
    if options.parent_fd is None:
        logger.info(
            "stopping: %s in flight may take %g s (--shutdown-grace-period-secs); a second Ctrl-C "
            "or SIGTERM ends them at once",
            counted(server.in_flight.client_requests, "request"),
            options.shutdown_grace_s,
        )
    await one_of(stop, unless=stopping)
    if not stop.done():
        stop.cancel()
        await asyncio.gather(stop, return_exceptions=True)
        return 1
    return 0


async def schedule(options: RouterOptions) -> int:
    """Run the scheduler process until SIGTERM or SIGINT. Returns the exit code, 0. Raises: OSError,
    an endpoint or port is in use."""
    process = SchedulerProcess(options)
    await process.start()
    place = f"policy {options.scheduler.policy} at {process.endpoint}{_elected_by(options)}"
    logger.info("scheduler: %s, %s", place, _listens_at(process))
    stopping, orphaned = asyncio.Event(), asyncio.Event()
    end_on_signals(stopping)
    if options.parent_fd is not None:
        port, endforward = process.prometheus_port, process.endforward_endpoint
        facts = {"prometheus_port": port, "endforward": endforward}
        report_to_parent(options.parent_fd, facts, gone=orphaned.set, let_go=process.let_go)
    _settle_memory()
    alone = asyncio.create_task(_outlast_front_ends(process, orphaned, options.shutdown_grace_s))
    await one_of(alone, unless=stopping)
    alone.cancel()
    await process.stop()
    return 0


async def _outlast_front_ends(
    process: SchedulerProcess, orphaned: asyncio.Event, grace_s: float
) -> None:
    """Return once the supervisor is lost and all front ends have then ended, at most ``grace_s``
    after its loss."""
    await orphaned.wait()
    logger.error("the supervisor is gone: ending with the last front end")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while process.front_ends:  # noqa: ASYNC110 - they leave without an event
                await asyncio.sleep(0.1)


def _listens_at(process: RouterServer | SchedulerProcess) -> str:
    endforward = process.endforward_endpoint or "nothing"
    return f"metrics at :{process.prometheus_port}, EndForward at {endforward}"


def _elected_by(options: RouterOptions) -> str:
    several = options.several
    if several.election is not None:
        return f" (known as {several.advertise}, elected by {several.election[0]})"
    if len(several.schedulers) > 1:
        return f" (known as {several.advertise}, the first of {len(several.schedulers)} schedules)"
    return ""


def _settle_memory() -> None:
    """Exclude start-up objects, which live forever, from garbage collection, and collect less
    often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


if __name__ == "__main__":
    sys.exit(main())
