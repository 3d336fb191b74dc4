"""``sglang-sbs trial``: start, watch and stop a trial of two policies on a running router."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import msgspec

from sglang_sbs.console import ask_router
from sglang_sbs.console.ask_router import NoAnswerError
from sglang_sbs.trial.report import ArmReport, TrialReport
from sglang_sbs.trial.spec import fields_of, read_object

_ABSENT = "this router runs no trials: upgrade sglang-sbs there"
_LOOK_S = 2.0


class _None(msgspec.Struct):
    """The router's response if no trial has run."""

    text: str


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sglang-sbs trial",
        description="Compare a router's policy with a baseline on its own traffic. The two take "
        "turns,\nslot by slot, until the difference in mean TTFT is certain. Then the router "
        "returns\nto its first policy. Without a baseline, show the trial that runs or the last "
        "one.",
        epilog="examples:\n"
        "  sglang-sbs trial round_robin --router http://router:30000 --wait\n"
        "  sglang-sbs trial round_robin,slot=5m,p99=5s,refused=1% --router http://router:30000\n"
        "  sglang-sbs trial --router http://router:30000          # how it stands\n"
        "  sglang-sbs trial --stop --router http://router:30000   # end it now\n"
        "\n"
        "keys after the baseline: slot (180s), slots (40, the most), width (0.1: end when the\n"
        "interval is narrower), p99 and refused (the trial ends when TTFT or the share of refused\n"
        "requests exceeds them), then (back, or winner: keep the faster policy), seed.\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    spec = "the policy to compare with, and how: BASELINE[,KEY=VALUE...]"
    made.add_argument("baseline", metavar="BASELINE", nargs="?", help=spec)
    ask_router.add_arguments(made)
    made.add_argument("--stop", action="store_true", help="end the trial that runs")
    made.add_argument("--wait", action="store_true", help="print each new verdict until it ends")
    made.add_argument("--json", action="store_true", help="print the router's answer as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0; 1 if the router cannot be reached or refuses; 130 if interrupted,
    which leaves the trial running. Bad flags exit with 2."""
    made = parser()
    args = ask_router.parse(made, argv)
    if args.baseline is not None and args.stop:
        made.error("--stop ends a trial: leave the baseline out")
    try:
        asked = None
        if args.baseline is not None:
            try:
                asked = fields_of(args.baseline)
                read_object(asked | {"baseline": "sbs"})  # the router checks the policy names
            except ValueError as error:
                made.error(str(error))
        answer = _ask(args, asked)
        while args.wait and isinstance(answer, TrialReport) and answer.running:
            slot = answer.slot
            time.sleep(_LOOK_S)
            answer = _ask(args, None)
            if (
                isinstance(answer, TrialReport)
                and answer.running
                and answer.slot > slot
                and not args.json
            ):
                print(ask_router.plain(answer.text), flush=True)
    except NoAnswerError as error:
        print(f"sglang-sbs trial: {ask_router.plain(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sglang-sbs trial: the trial goes on; --stop ends it", file=sys.stderr)
        return 130
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        print(ask_router.plain(page_of(answer)), end="")
    return 0


def _ask(args: argparse.Namespace, asked: dict[str, str] | None) -> TrialReport | _None:
    """Begin a trial with the fields ``asked``, or else end it (``--stop``) or show it; return the
    router's answer. Raises: NoAnswerError, there is no valid answer."""
    body = None if asked is None else msgspec.json.encode(asked)
    method = "POST" if asked is not None else "DELETE" if args.stop else "GET"
    answer = ask_router.ask(args, "/trial", body, absent=_ABSENT, method=method)
    try:
        found = msgspec.json.decode(answer, type=dict)
        if "policy" in found:
            return msgspec.convert(found, type=TrialReport)
        return msgspec.convert(found, type=_None)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        text = f"{args.router}: the answer is not one of this release: {error}"
        raise NoAnswerError(text) from error


def page_of(answer: TrialReport | _None) -> str:
    if isinstance(answer, _None):
        return answer.text + "\n"
    times = "".join(f"{name:>9}" for name in ("mean", "p50", "p99", "refused"))
    lines = [answer.text, f"  {'policy':<16}{'slots':>6}{'requests':>10}{times}{'unanswered':>12}"]
    lines += [_row(arm) for arm in answer.arms.values()]
    if answer.low is not None and answer.high is not None:
        sure = f"{answer.confidence:.0%} certain at every look"
        lines.append(f"ratio {answer.ratio:.3f} ({answer.low:.3f} to {answer.high:.3f}), {sure}")
    thirds = [f"{ratio:.2f}x" if ratio is not None else "-" for ratio in answer.ratio_by_third]
    lines.append(
        f"by thirds of a slot: {', '.join(thirds)}. The first is not counted, because the slot "
        "before still weighs. If the other two differ much, use longer slots."
    )
    if answer.now is not None and answer.slot_left_s is not None:
        has = answer.arms[answer.now].policy if answer.now in answer.arms else answer.now
        most = f"slot {answer.slot + 1} of at most {answer.slots}"
        lines.append(f"{most}: {has} decides for another {answer.slot_left_s:.0f} s")
    if answer.warning:
        lines.append(f"warning: {answer.warning}")
    lines.append(f"order of slots from seed {answer.seed}")
    return "\n".join(lines) + "\n"


def _row(arm: ArmReport) -> str:
    times = (arm.mean_ttft_s, arm.p50_ttft_s, arm.p99_ttft_s)
    shown = "".join(f"{'-' if time_s is None else f'{time_s:.3f}s':>9}" for time_s in times)
    counts = f"{arm.refused:>9,}{arm.unanswered:>12,}"
    return f"  {arm.policy:<16}{arm.slots:>6}{arm.requests:>10,}{shown}{counts}"
