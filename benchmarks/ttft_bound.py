"""``scripts/ttft-bound``: how small the mean TTFT could be, whoever schedules.

The bound holds for every schedule that computes each prompt in one pass, also for one that knows
all arrivals, lengths and pass times beforehand and spreads the tokens of a pass evenly over the DP
ranks. Three facts, each of which a schedule pays for:

1. A request is in a pass that starts after it has arrived, and waits for the last of those it
   shares it with.
2. It is done when its pass ends. A pass of W tokens takes at least a + c * W, with a the fixed time
   and c the slope over the number of ranks; and, as a prompt of one chunk is computed on one rank,
   at least what its longest prompt needs there.
3. All passes together take no longer than the instances have: N * (time until all is done).

With a price p on a second of an instance (Lagrange), part of it on what a pass costs in 1 and the
rest in 2, either part is least on its own terms:

1. is a partition of the arrivals into runs of neighbours, found by dynamic programming: passes are
   as frequent as the price allows, at the best moments.
2. In a pass of m requests a request of s tokens sees, summed over the pass, m * s tokens, and pays
   an m-th of the fixed time. What m suits it best depends on s alone: as if each had a pass full of
   its equals.

Every price gives a bound, and the largest one found counts. What is left out makes it smaller than
any schedule can be: both parts have passes of their own, one instance's pass may start while it
still computes another, and chunks are unlimited.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from benchmarks.command_line import command_parser, interruptible
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.cost import PassCost
from sglang_sbs.simulator.experiments import sweep
from sglang_sbs.simulator.experiments.tables import ResultTable, groups, mean_of
from sglang_sbs.simulator.options import common
from sglang_sbs.simulator.options.common import names, run_with_progress
from sglang_sbs.simulator.parallel import Row, Task
from sglang_sbs.simulator.workloads.scenario import WARM_UP_S

_PROG = "scripts/ttft-bound"
BOUND = "bound"
_SCENARIOS = ("paper-3k", "paper-5k")
_DRAIN_S = 2.0
"""A schedule is assumed to be done so long after the last arrival; longer would only be worse."""
_PRICES = 6
_ROUNDS = 3
_MOST_PRICE = 64.0

_EPILOG = """\
The bound is for any schedule that computes each prompt in one pass, with full knowledge of the
future and perfect balance of DP ranks. None reaches it either: what lies between is not known.
The second figure of a cell is the bound as a share of the policy's mean; no other policy can have
a smaller share of that.

example:
  scripts/ttft-bound paper-3k --policies sbs,eta,random_rank --loads 0.6,0.8,1.0 --seeds 3
"""


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal instances, seconds."""

    cost: PassCost
    instances: int
    dp_size: int
    latency_s: float


def mean_ttft_bound_s(arrivals: Sequence[Arrival], machines: Machines) -> float:
    """The largest lower bound of the mean TTFT that was found. ``arrivals``: in time order; each
    prompt is computed in one pass."""
    if not arrivals:
        return math.nan
    bound_s = _relaxed(arrivals, machines)
    # Concave in both prices and the share: one after the other, on finer and finer grids.
    best, at = bound_s(0.0, 0.0, 1.0), [0.0, 0.0, 1.0]
    grids: list[Callable[[float], list[float]]] = [_around, _around, lambda _: [0.0, 0.5, 0.8, 1.0]]
    for _, (index, grid) in product(range(_ROUNDS), enumerate(grids)):
        for value in grid(at[index]):
            tried = [*at[:index], value, *at[index + 1 :]]
            bound = bound_s(*tried)
            if bound > best:
                best, at = bound, tried
    return best / len(arrivals)


def _relaxed(
    arrivals: Sequence[Arrival], machines: Machines
) -> Callable[[float, float, float], float]:
    """The Lagrangian, in seconds summed over requests."""
    cost = machines.cost
    at_s = [arrival.at_s for arrival in arrivals]
    machine_s = machines.instances * (at_s[-1] - at_s[0] + _DRAIN_S)
    waits_s = cache(partial(least_waits_s, at_s))

    def bound_s(wait_price: float, size_price: float, spread: float) -> float:
        """The bound at these prices of a second of an instance; ``spread`` is how much of the
        slowest rank's time is counted as if its tokens were spread over all, the rest as if it had
        only the longest prompt."""
        price = wait_price + size_price
        slope_s = (cost.mean_s + spread * cost.max_s) / machines.dp_size
        alone_s = (1 - spread) * cost.max_s
        total_s = len(arrivals) * (machines.latency_s + cost.fixed_s) - price * machine_s
        for arrival in arrivals:
            own_s, shared_s = arrival.prompt_tokens * slope_s, arrival.prompt_tokens * alone_s
            total_s += price * own_s + shared_s
            total_s += _least(own_s, size_price * cost.fixed_s + price * shared_s)
        return total_s + waits_s(wait_price * cost.fixed_s)

    return bound_s


def least_waits_s(at_s: Sequence[float], pass_s: float) -> float:
    """Arrivals, in time order, are divided into runs of neighbours. Each waits for the last of its
    run, and every run costs ``pass_s``: the least sum."""
    best = [0.0]
    earliest = 0
    for last, last_s in enumerate(at_s):
        # The best run that ends here never begins before the best one that ends before it.
        wait_s, least_s, begins = 0.0, math.inf, last
        for begin in range(last, earliest - 1, -1):
            before_s = last_s - at_s[begin]
            if before_s > pass_s:
                break  # this one would be better off in a run of its own
            wait_s += before_s
            total_s = best[begin] + wait_s + pass_s
            if total_s < least_s:
                least_s, begins = total_s, begin
        best.append(least_s)
        earliest = begins
    return best[-1]


def _least(per_member_s: float, shared_s: float) -> float:
    """The least m * per_member_s + shared_s / m over whole m of at least 1."""
    if per_member_s <= 0:
        return 0.0
    m = max(1, math.floor(math.sqrt(shared_s / per_member_s)))
    return min(m * per_member_s + shared_s / m, (m + 1) * per_member_s + shared_s / (m + 1))


def _around(price: float) -> list[float]:
    """Prices to try next to one."""
    if price == 0:
        return [_MOST_PRICE / 2**i for i in range(_PRICES * 2)]
    return [price * 1.19**step for step in range(-_PRICES, _PRICES + 1)]


def build_parser() -> argparse.ArgumentParser:
    what = "How small could the mean TTFT be, whoever schedules?"
    parser = command_parser(_PROG, what, _EPILOG)
    parser.add_argument("scenario", choices=_SCENARIOS)
    parser.add_argument("--policies", default="sbs,eta,random_rank", help="held against it (all)")
    parser.add_argument(
        "--loads", type=common.numbers, default=[0.6, 0.8, 1.0, 1.2], help="(0.6 to 1.2)"
    )
    seconds = "simulated seconds (80)"
    parser.add_argument("--duration", type=common.positive_number, default=80.0, help=seconds)
    parser.add_argument("--prefill", type=common.positive, default=3, help="prefill instances (3)")
    common.add_overlap(parser)
    common.add_common(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 2 for bad arguments, 130 if interrupted."""
    return interruptible(_PROG, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    common.check_outputs(args, parser)
    if args.duration <= WARM_UP_S:
        parser.error(f"--duration must be longer than the warm-up of {WARM_UP_S:g} s")
    policies = names(args.policies, sweep.POLICY_CONFIGS, "--policies", parser)
    costs = common.cost_words(args.cost, parser)
    spec = {"prefill_instances": args.prefill, "overlap": args.overlap}
    jobs = [
        sweep.Job(args.scenario, policy, load, seed, args.duration, cost, spec)
        for cost, load, seed, policy in product(
            costs, args.loads, common.seeds(args), [BOUND, *policies]
        )
    ]
    tasks: list[Task] = [
        (bound_row if job.policy == BOUND else sweep.run_job, (job,)) for job in jobs
    ]
    console = common.open_console()
    rows = run_with_progress(tasks, console, args.workers)
    for mine in groups(rows, "cost").values():
        bound_table(mine).print(console)
    common.write_json(rows, args.json, console)
    return 0


def bound_row(job: sweep.Job) -> Row:
    """The bound for the requests that a run of the job counts."""
    scenario = sweep.scenario_of(job)
    spec = scenario.spec
    arrivals = scenario.at_load(job.load, job.duration_s, job.seed)
    assert isinstance(arrivals, list)
    counted = [arrival for arrival in arrivals if arrival.at_s >= WARM_UP_S]
    dp_size = spec.prefill[0][1].dp_size
    machines = Machines(spec.cost, len(spec.prefill), dp_size, spec.dispatch_latency_s)
    return {
        **sweep.row_head(job, scenario),
        "ttft_mean_s": mean_ttft_bound_s(counted, machines),
        "completed": len(counted),
    }


def bound_table(rows: Sequence[Row]) -> ResultTable:
    """Mean TTFT, and the bound as a share of it: a row per policy, a column per load."""
    cells = groups(rows, "policy", "load")
    mean_s = {place: mean_of(mine, "ttft_mean_s") for place, mine in cells.items()}
    loads = list(dict.fromkeys(row["load"] for row in rows))
    table = ResultTable(
        f"mean TTFT, and the least possible share of it; {rows[0]['scenario']}, "
        f"cost {rows[0]['cost']}",
        ["policy", *(f"load {load:g}" for load in loads)],
    )
    for (policy,) in groups(rows, "policy"):
        pairs = [(mean_s[policy, load], mean_s[BOUND, load]) for load in loads]
        table.rows.append([policy, *(f"{mine_s:.3f}  {b_s / mine_s:.2f}" for mine_s, b_s in pairs)])
    return table
