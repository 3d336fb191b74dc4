"""``sglang-sbs scheduler``: the scheduler alone, for front ends on other machines. It is
:mod:`sglang_sbs.launch_router` in the role of a scheduler, with the same flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang_sbs import launch_router
from sglang_sbs.router.options.arguments import SCHEDULER


def main(argv: Sequence[str] | None = None) -> int:
    """Run a scheduler until SIGTERM or SIGINT. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return launch_router.main(["--sbs-role", "scheduler", *arguments], SCHEDULER)


if __name__ == "__main__":
    sys.exit(main())
