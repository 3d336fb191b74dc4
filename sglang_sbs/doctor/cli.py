"""``sglang-sbs doctor``: the command."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import orjson
from rich.console import Console

from sglang_sbs.console.plain_words import naming_file, plain_error
from sglang_sbs.doctor.examine import gather, judge
from sglang_sbs.doctor.features import feature_rows
from sglang_sbs.doctor.options import DoctorOptions, parse_options
from sglang_sbs.doctor.report import (
    as_json,
    exit_code,
    features_exit_code,
    features_json,
    print_features,
    print_report,
)
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.tls import worker_ssl


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if nothing is worse than notes, 1 if something is wrong, 2 for an unusable command
    line."""
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
        worker_ssl(options.router_flags)  # the error names the unusable file
    except (FlagError, ValueError) as error:
        print(f"sglang-sbs doctor: {error}", file=sys.stderr)
        return 2
    try:
        return asyncio.run(_examine(options))
    except OSError as error:  # writing the report failed
        print(f"sglang-sbs doctor: {plain_error(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sglang-sbs doctor: interrupted", file=sys.stderr)
        return 130


async def _examine(options: DoctorOptions) -> int:
    errors = Console(stderr=True)
    with errors.status("starting") as status:
        facts = await gather(options, status.update)
    console = Console(highlight=False)
    if options.features:
        rows = feature_rows(facts)
        report, code = features_json(facts, rows), features_exit_code(facts)
        show = partial(print_features, console, facts, rows)
    else:
        findings = judge(facts)
        report, code = as_json(facts, findings), exit_code(findings, strict=options.strict)
        show = partial(print_report, console, facts, findings)
    if options.json is not None:
        data = orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n"
        if options.json == Path("-"):
            sys.stdout.write(data.decode())
            return code
        with naming_file("--json", options.json):
            options.json.write_bytes(data)
    show(quiet=options.quiet)
    return code


if __name__ == "__main__":
    sys.exit(main())
