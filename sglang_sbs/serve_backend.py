"""``sglang serve MODEL --model-type sbs``: `sglang_sbs.launch_server` behind SGLang's own command
(0.5.20+, entry points ``sglang.serve_backends``). ``sglang serve`` loads every backend to find the
one for a model, so this module imports nothing heavy before it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.cli.serve_backends import ServeBackend, ServeRequest

API_VERSION = 1
"""Version of SGLang's serve-backend interface implemented here. SGLang refuses a backend of another
version with a message."""
COMMAND = "sglang serve --model-type sbs"


def backend() -> ServeBackend:
    """Return the backend for SGLang's entry point. It has no model detector, so SBS is used only on
    request."""
    from sglang.cli.serve_backends import ServeBackend

    return ServeBackend(api_version=API_VERSION, run=run)


def run(request: ServeRequest) -> None:
    """Serve until a signal. Raises: SystemExit, as `launch_server.main` does."""
    from sglang_sbs.launch_server import build_parser, main

    if {"-h", "--help"} & set(request.argv):
        # SGLang continues after the help with its own line.
        build_parser(COMMAND).print_help()
        return
    main(request.argv, prog=COMMAND)
