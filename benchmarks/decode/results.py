"""What the decode experiment gave, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_sbs.simulator.experiments.policy_looks import colours_of
from sglang_sbs.simulator.experiments.tables import ResultTable, groups, mean_of, means
from sglang_sbs.simulator.parallel import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def decode_table(rows: Sequence[Row]) -> ResultTable:
    """KV band, largest batch and throughput per decode policy."""
    by_policy = {policy: mine for (policy,), mine in groups(rows, "policy").items()}
    speeds = {policy: mean_of(mine, "tokens_per_s") for policy, mine in by_policy.items()}
    references = [name for name in ("round_robin", "skewed") if name in speeds]

    def gains(speed: float) -> list[str]:
        return [f"{speed / speeds[name] - 1:+.1%}" for name in references]

    columns = ["policy", "band (-/+ 1 sd)", "CV", "peak", "largest batch", "tokens/s"]
    table = ResultTable(
        f"KV tokens per decode rank and throughput; step cost {rows[0]['cost']}",
        [*columns, *(f"vs {name}" for name in references)],
    )
    for policy, mine in by_policy.items():
        low, high, peak = (
            f"{mean_of(mine, key) / 1e3:.0f}K"
            for key in ("kv_sigma_low", "kv_sigma_high", "kv_peak")
        )
        even = means(mine, "{:.1%}", "kv_cv")
        cells = [f"{low}-{high}", even, peak, f"{mean_of(mine, 'batch_max'):.1f}"]
        table.rows.append([policy, *cells, f"{speeds[policy]:.0f}", *gains(speeds[policy])])
    bound = mean_of(rows, "balanced_tokens_per_s")
    table.rows.append(["perfect balance", *[""] * 4, f"{bound:.0f}", *gains(bound)])
    return table


def decode_summary(rows: Sequence[Row]) -> Figure:
    """KV band and throughput per decode policy."""
    from sglang_sbs.simulator.experiments.plots import panels

    policies = groups(rows, "policy")
    names = [policy for (policy,) in policies]
    colours = colours_of(names)
    figure, (band, speed) = panels(1, 2, 7, 4.5)
    for position, ((policy,), mine) in enumerate(policies.items()):
        keys = ("kv_sigma_low", "kv_sigma_high", "kv_peak", "tokens_per_s")
        low, high, peak, tokens = (mean_of(mine, key) for key in keys)
        band.bar(position, (high - low) / 1e3, 0.6, bottom=low / 1e3, color=colours[policy])
        band.plot(position, peak / 1e3, "k_", markersize=20)
        speed.bar(position, tokens, 0.6, color=colours[policy])
    for axis in (band, speed):
        axis.set_xticks(range(len(names)), names, rotation=20)
    band.set_ylabel("KV tokens per rank in K: mean -/+ 1 sd, peak")
    speed.set_ylabel("tokens/s")
    return figure
