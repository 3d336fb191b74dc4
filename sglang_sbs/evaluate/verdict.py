"""Results of an evaluation as numbers, sentences and tables. Simulates nothing."""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec

from sglang_sbs.evaluate.bootstrap import LEAST_BLOCKS, Ratios, blocks_of, ratios
from sglang_sbs.evaluate.fitting.calibration import predict_s
from sglang_sbs.evaluate.replayed import RAN
from sglang_sbs.evaluate.workload import TooLittle, Workload
from sglang_sbs.simulator.cluster.outcome import quantile
from sglang_sbs.simulator.experiments.tables import ResultTable, groups
from sglang_sbs.simulator.parallel import Row
from sglang_sbs.trial.ratios import Ratio

ACCEPTED = 0.10
"""Largest relative error of the model for which ratios are given. Applies to the modelled mean TTFT
of the recorded run, and to the median prediction for passes that the fit has not seen."""
_MODEL_ERROR = 0.09
"""Relative error of a predicted ratio that the bootstrap cannot show: the largest of twelve pairs
of runs on real engines, whose predicted mean TTFTs were 1 to 9 % too low. Of five later ones, one
was 10 % too low (docs/evaluate.md)."""
_PASSES_PER_BLOCK = 10
"""Length of a bootstrap block in mean pass times: queues do not depend on load that long ago."""
_POOR_FIT = 0.15


class Calibrated(msgspec.Struct, frozen=True):
    """Modelled over measured TTFT of the recorded placement, in the mean and the p99."""

    mean: float
    p99: float


class Evaluation:
    """Collects the results of simulations (rows) as they arrive, and derives the answer."""

    def __init__(self, work: Workload) -> None:
        """Create an evaluation. Raises: TooLittle, the log is too short for an interval."""
        self.work = work
        self._rows: list[Row] = []
        self._policies: dict[str, Ratios] | None = None
        """Cached value of :attr:`policies`; None if it must be calculated again."""
        self._counted = work.counted
        self._measured_s = sorted(work.measured_s[i] for i in self._counted)
        ends_s = [a_pass.forward_s + work.calibration.launch_gap_s for a_pass in work.passes]
        self._pass_s = statistics.fmean(s for s in ends_s if not math.isnan(s))
        times_s = [work.arrivals[i].at_s for i in self._counted]
        self._blocks = blocks_of(times_s, _PASSES_PER_BLOCK * self._pass_s)
        if len(set(self._blocks)) < LEAST_BLOCKS:
            least_s = _PASSES_PER_BLOCK * self._pass_s * LEAST_BLOCKS
            raise TooLittle(
                f"spans {work.seconds:.0f} s; with passes of {self._pass_s:.2f} s at least "
                f"{math.ceil(least_s)} s are needed"
            )

    def add(self, row: Row) -> None:
        """Add the result of one simulation (:func:`.replayed.run`)."""
        self._rows.append(row)
        self._policies = None

    @property
    def calibration(self) -> Calibrated | None:
        """How well the model reproduces the recorded run; None before that was simulated."""
        draws = self._draws(RAN)
        if not draws:
            return None
        mean_s = statistics.fmean(statistics.fmean(draw) for draw in draws)
        p99_s = statistics.fmean(quantile(sorted(draw), 0.99) for draw in draws)
        return Calibrated(mean_s / self.measured_mean_s, p99_s / self.measured_p99_s)

    @property
    def accepted(self) -> bool:
        found = self.calibration
        return found is not None and abs(found.mean - 1) <= ACCEPTED and self._fit <= ACCEPTED

    @property
    def _fit(self) -> float:
        errors = self.work.errors
        held_out = errors.held_out_median_share
        return errors.median_share if held_out is None else held_out

    @property
    def measured_mean_s(self) -> float:
        return statistics.fmean(self._measured_s)

    @property
    def measured_p99_s(self) -> float:
        return quantile(self._measured_s, 0.99)

    @property
    def policies(self) -> dict[str, Ratios]:
        """TTFT of each policy over that of the recorded run, both simulated; empty if the model
        does not reproduce the recorded run (``accepted``)."""
        if not self.accepted:
            return {}
        if self._policies is None:
            ran = self._draws(RAN)
            names = dict.fromkeys(row["policy"] for row in self._rows if row["policy"] != RAN)
            found = {name: ratios(self._draws(name), ran, self._blocks) for name in names}
            self._policies = {
                name: Ratios(_with_model_error(both.mean), _with_model_error(both.p99))
                for name, both in found.items()
            }
        return self._policies

    def _draws(self, policy: str) -> list[list[float]]:
        mine = [row for row in self._rows if row["policy"] == policy]
        # Processes finish in any order, and intervals are drawn from the results in this one.
        mine.sort(key=lambda row: row["draw"])
        return [[row["ttft_s"][i] for i in self._counted] for row in mine]

    def by_block(self) -> tuple[list[float], list[float], list[float]]:
        """Return three lists by block of time, in seconds: mean arrival, measured mean TTFT and
        modelled mean TTFT."""
        draws = self._draws(RAN)
        measured_s = [self.work.measured_s[i] for i in self._counted]
        modelled_s = [statistics.fmean(some) for some in zip(*draws, strict=True)]
        times_s = [self.work.arrivals[i].at_s for i in self._counted]
        rows = list(zip(self._blocks, times_s, measured_s, modelled_s, strict=True))
        means = [
            tuple(statistics.fmean(row[column] for row in mine) for column in (1, 2, 3))
            for block in sorted(set(self._blocks))
            if (mine := [row for row in rows if row[0] == block])
        ]
        at_s, real_s, model_s = (list(column) for column in zip(*means, strict=True))
        return at_s, real_s, model_s

    # In words -----------------------------------------------------------------------------------

    def sentences(self) -> list[str]:
        found = self.calibration
        if found is None:
            return ["The recorded run was not simulated to its end, so there is no answer."]
        if not self.accepted:
            return [*self._refusal(found), *self.notes()]
        of_policies = self.policies
        if not of_policies:
            first = f"On {self._span()} {self._reproduces(found)}; no policy was simulated yet."
            return [first, *self.notes()]
        lines: list[str] = []
        for name, both in of_policies.items():
            start = f"On {self._span()} {name}" if not lines else name
            ratio = both.mean.words()
            lines.append(f"{start} would have had {ratio} the mean TTFT of the recorded run")
        first = f"{lines[0]}; {self._reproduces(found)}."
        return [first, *(f"{line}." for line in lines[1:]), *self.notes()]

    def _span(self) -> str:
        work = self.work
        number = f"{len(self._counted):,} requests, load {work.load:.2f}"
        return f"{_time_words(work.seconds)} ({number})"

    def _reproduces(self, found: Calibrated) -> str:
        mean, p99 = abs(found.mean - 1), abs(found.p99 - 1)
        return f"the model reproduces this run to {mean:.0%} in the mean and {p99:.0%} in the p99"

    def _refusal(self, found: Calibrated) -> list[str]:
        off = abs(found.mean - 1)
        if off > ACCEPTED:
            side = "above" if found.mean > 1 else "below"
            fault = f"the modelled mean TTFT of this run is {off:.0%} {side} the measured one"
        else:
            fault = f"the fitted cost of a pass is {self._fit:.0%} off in the median"
        first = (
            f"On {self._span()} {fault}. More than {ACCEPTED:.0%} is too far for an answer, so "
            "there is no ratio."
        )
        return [first, *(f"Possible cause: {cause}." for cause in self._causes())]

    def _causes(self) -> list[str]:
        work, causes = self.work, []
        if work.errors.p95_share > _POOR_FIT:
            causes.append(
                f"pass times do not follow tokens and requests (5 % of the passes are more than "
                f"{work.errors.p95_share:.0%} off the fitted cost): other work shares the "
                "hardware, or passes wait for something else"
            )
        spans = [
            a_pass for a_pass in work.passes if a_pass.complete and a_pass.previous is not None
        ]
        device_s = sum(a_pass.forward_s for a_pass in spans)
        wall_s = sum(
            a_pass.end_s - max(a_pass.launch_s, a_pass.previous.end_s)
            for a_pass in spans
            if a_pass.previous is not None and a_pass.previous.complete
        )
        if device_s > 0 and abs(wall_s / device_s - 1) > ACCEPTED:
            causes.append(
                f"passes take {wall_s / device_s:.2f}x the forward time that the engines report"
            )
        halves = self._halves()
        if halves is not None and abs(halves - 1) > ACCEPTED:
            causes.append(
                f"passes of the second half take {halves:.2f}x the time that the same tokens took "
                "in the first: the hardware or the engines changed during the log"
            )
        if work.load > 0.95:
            causes.append(
                f"the load is {work.load:.2f}: near saturation a small error in the cost of a pass "
                "becomes a large error in the waiting time"
            )
        if not causes:
            causes.append(
                "waiting outside of passes, in the network, the tokenizer or the KV transfer"
            )
        return causes

    def _halves(self) -> float | None:
        """Return the ratio of measured to predicted pass time in the log's second half, divided by
        that in the first; None if there are too few passes."""
        cost = self.work.spec.cost
        whole = [a_pass for a_pass in self.work.passes if a_pass.complete and any(a_pass.tokens)]
        middle = len(whole) // 2
        shares = [
            sum(a_pass.forward_s for a_pass in part)
            / sum(predict_s(cost, a_pass) for a_pass in part)
            for part in (whole[:middle], whole[middle:])
            if part
        ]
        return shares[1] / shares[0] if len(shares) == 2 and shares[0] > 0 else None

    def notes(self) -> list[str]:
        """Return sentences on limitations that a reader of the result should know."""
        notes = [f"Note: {note}." for note in self.work.notes]
        if not self.work.until_first_byte:
            notes.append(
                "Note: the log has no first bytes, so TTFT is counted until the end of the prompt. "
                "Delays of the router itself are not in it. A router that waits for prefill's "
                "response, as sglang_router does, adds up to a pass."
            )
        for (policy,), mine in groups(self._rows, "policy").items():
            if left := max(row["unfinished"] for row in mine):
                notes.append(
                    f"Note: in the model of {policy or 'the recorded run'}, {left:,} requests got "
                    "no first token. Each counts with the time for which it waited."
                )
        return notes

    # As tables ----------------------------------------------------------------------------------

    def tables(self) -> list[ResultTable]:
        found = self.calibration
        if found is None:
            return []
        mean_s, p99_s = self.measured_mean_s, self.measured_p99_s
        mine = [row for row in self._rows if row["policy"] == RAN]
        passes = statistics.fmean(row["passes"] for row in mine)
        real = [a_pass.forward_s for a_pass in self.work.passes if a_pass.complete]
        pass_s = statistics.fmean(row["pass_s"] for row in mine)
        rows = [
            ["mean TTFT", f"{mean_s:.3f} s", f"{found.mean * mean_s:.3f} s", f"{found.mean:.2f}"],
            ["p99 TTFT", f"{p99_s:.3f} s", f"{found.p99 * p99_s:.3f} s", f"{found.p99:.2f}"],
            _row("passes", len(real), passes, "{:,.0f}"),
            _row("mean pass", statistics.fmean(real), pass_s, "{:.3f} s"),
        ]
        ran = ", ".join(self.work.policies)
        calibration = ResultTable(
            f"the recorded run ({ran}), measured and modelled",
            ["", "measured", "modelled", "ratio"],
            rows,
        )
        of_policies = self.policies
        if not of_policies:
            return [calibration]
        compared = ResultTable(
            "TTFT relative to the recorded run, both modelled, with 95 % intervals",
            ["policy", "mean", "p99", "mean TTFT", "p99 TTFT"],
            [
                [
                    name,
                    ratios.mean.words(),
                    ratios.p99.words(),
                    f"{ratios.mean.ratio * mean_s:.3f} s",
                    f"{ratios.p99.ratio * p99_s:.3f} s",
                ]
                for name, ratios in of_policies.items()
            ],
        )
        return [compared, calibration]

    def json(self) -> dict[str, Any]:
        found, work = self.calibration, self.work
        return {
            "verdict": self.sentences()[0],
            "calibration": None if found is None else {"mean": found.mean, "p99": found.p99},
            "policies": {name: _flat(ratios) for name, ratios in self.policies.items()},
            "requests": len(self._counted),
            "seconds": work.seconds,
            "load": work.load,
            "ran": work.policies,
            "measured_until": "first byte" if work.until_first_byte else "end of the prompt",
            "measured_mean_s": self.measured_mean_s,
            "measured_p99_s": self.measured_p99_s,
            "fit": {**msgspec.to_builtins(work.calibration), "errors": work.errors},
            "notes": self.notes(),
        }


def _flat(ratios: Ratios) -> dict[str, float]:
    return {
        "mean_ratio": ratios.mean.ratio,
        "low": ratios.mean.low,
        "high": ratios.mean.high,
        "p99_ratio": ratios.p99.ratio,
        "p99_low": ratios.p99.low,
        "p99_high": ratios.p99.high,
    }


def _row(name: str, real: float, modelled: float, form: str) -> list[str]:
    return [name, form.format(real), form.format(modelled), f"{modelled / real:.2f}"]


def _time_words(seconds: float) -> str:
    if seconds < 100:
        return f"these {seconds:.0f} seconds"
    minutes = round(seconds / 60)
    if abs(minutes - 60) <= 3:
        return "this hour"
    return f"these {minutes} minutes" if minutes < 100 else f"these {seconds / 3600:.1f} hours"


def _with_model_error(found: Ratio) -> Ratio:
    """Return the ratio with its interval widened by ``_MODEL_ERROR``, which is independent of the
    sampling."""
    ratio, error = found.ratio, _MODEL_ERROR * found.ratio
    low = ratio - math.hypot(ratio - found.low, error)
    return Ratio(ratio, max(0.0, low), ratio + math.hypot(found.high - ratio, error))
