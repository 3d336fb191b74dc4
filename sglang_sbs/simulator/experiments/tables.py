"""Results as tables: one form for the terminal and the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from sglang_sbs.simulator.parallel import Row


@dataclass(slots=True)
class ResultTable:
    """Text in rows; the first column is a name."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def print(self, console: Console) -> None:
        """To the terminal."""
        table = Table(title=self.title)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)


def mean_of(rows: Sequence[Row], key: str) -> float:
    """Mean over the rows that have the value; NaN if none does."""
    values = [row[key] for row in rows if row[key] is not None and not math.isnan(row[key])]
    return statistics.fmean(values) if values else math.nan


def load_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """Mean and p99 TTFT, chunk utilisation and what was refused: a row per policy, a column per
    load; a table per cost model and chunk size."""
    tables = []
    for cost, chunk in dict.fromkeys((r["cost"], r["chunk_tokens"]) for r in rows):
        shown = [r for r in rows if (r["cost"], r["chunk_tokens"]) == (cost, chunk)]
        loads = list(dict.fromkeys(r["load"] for r in shown))
        table = ResultTable(
            f"mean / p99 TTFT in s, chunk use; {shown[0]['scenario']}, cost {cost}, chunk {chunk}",
            ["policy", *(f"load {load:g}" for load in loads)],
        )
        for policy in dict.fromkeys(r["policy"] for r in shown):
            cells = []
            for load in loads:
                mine = [r for r in shown if (r["policy"], r["load"]) == (policy, load)]
                saturated = any(r["unfinished"] for r in mine)
                mean_s = mean_of(mine, "ttft_mean_s")
                if math.isnan(mean_s):
                    arrived = any(r["rejected"] or r["unfinished"] for r in mine)
                    cells.append("nothing completed" if arrived else "no arrivals after warm-up")
                    continue
                refused = sum(r["rejected"] for r in mine) / sum(
                    r["completed"] + r["rejected"] for r in mine
                )
                use = mean_of(mine, "chunk_utilization")
                cells.append(
                    f"{mean_s:.3f}/{mean_of(mine, 'ttft_p99_s'):.2f}"
                    + ("" if math.isnan(use) else f" {use:.0%}")
                    + (f" ({refused:.0%} refused)" if refused else "")
                    + (" (saturated)" if saturated else "")
                )
            table.rows.append([policy, *cells])
        tables.append(table)
    return tables


def balance_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """How evenly passes are spread over DP ranks: a row per policy, a column per load; a table per
    cost model and chunk size."""
    tables = []
    for cost, chunk in dict.fromkeys((r["cost"], r["chunk_tokens"]) for r in rows):
        shown = [r for r in rows if (r["cost"], r["chunk_tokens"]) == (cost, chunk)]
        loads = list(dict.fromkeys(r["load"] for r in shown))
        table = ResultTable(
            "active DP ranks per pass, tokens of the heaviest rank / mean; "
            f"{shown[0]['scenario']}, cost {cost}, chunk {chunk}",
            ["policy", *(f"load {load:g}" for load in loads)],
        )
        for policy in dict.fromkeys(r["policy"] for r in shown):
            cells = []
            for load in loads:
                mine = [r for r in shown if (r["policy"], r["load"]) == (policy, load)]
                active = mean_of(mine, "active_rank_count")
                heaviest = mean_of(mine, "max_over_mean")
                cells.append("" if math.isnan(active) else f"{active:.2f} {heaviest:.2f}")
            table.rows.append([policy, *cells])
        tables.append(table)
    return tables


def cache_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """Hit rate and computed tokens by the clairvoyant optimum: a row per policy, a column per load;
    a table per cost model and chunk size. None where no prompt found anything."""
    if not any(row["hit_rate"] for row in rows if not math.isnan(row["hit_rate"])):
        return []
    tables = []
    for cost, chunk in dict.fromkeys((r["cost"], r["chunk_tokens"]) for r in rows):
        shown = [r for r in rows if (r["cost"], r["chunk_tokens"]) == (cost, chunk)]
        loads = list(dict.fromkeys(r["load"] for r in shown))
        table = ResultTable(
            f"hit rate, computed / optimum; {shown[0]['scenario']}, cost {cost}, chunk {chunk}",
            ["policy", *(f"load {load:g}" for load in loads)],
        )
        for policy in dict.fromkeys(r["policy"] for r in shown):
            cells = []
            for load in loads:
                mine = [r for r in shown if (r["policy"], r["load"]) == (policy, load)]
                computed, optimal = (
                    sum(r[key] for r in mine) for key in ("computed_tokens", "optimal_tokens")
                )
                cells.append(
                    f"{mean_of(mine, 'hit_rate'):.0%} {computed / optimal:.2f}" if optimal else ""
                )
            table.rows.append([policy, *cells])
        tables.append(table)
    return tables


def day_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """How each policy follows a load that rises and falls: a row per policy and mean load, a column
    per part of the day; a table per cost model and chunk size."""
    tables = []
    of_days = [row for row in rows if "ttft_by_part_s" in row]
    for cost, chunk in dict.fromkeys((r["cost"], r["chunk_tokens"]) for r in of_days):
        shown = [r for r in of_days if (r["cost"], r["chunk_tokens"]) == (cost, chunk)]
        parts = len(shown[0]["ttft_by_part_s"])
        table = ResultTable(
            f"mean TTFT in s by part of the day; cost {cost}, chunk {chunk}",
            ["policy, mean load", *(f"{part + 1}/{parts}" for part in range(parts))],
        )
        for policy, load in dict.fromkeys((r["policy"], r["load"]) for r in shown):
            mine = [r for r in shown if (r["policy"], r["load"]) == (policy, load)]
            columns = zip(*(r["ttft_by_part_s"] for r in mine), strict=True)
            means = [statistics.fmean(column) for column in columns]
            table.rows.append([f"{policy}, {load:g}", *(f"{mean_s:.3f}" for mean_s in means)])
        tables.append(table)
    return tables


def loop_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """Mean end-to-end latency, tokens per second and instance, and active ranks per pass: a row per
    policy, a column per load; a table per cost model and chunk size. None without a closed loop."""
    tables = []
    with_agents = [row for row in rows if "agents" in row]
    for cost, chunk in dict.fromkeys((r["cost"], r["chunk_tokens"]) for r in with_agents):
        shown = [r for r in with_agents if (r["cost"], r["chunk_tokens"]) == (cost, chunk)]
        loads = list(dict.fromkeys((r["load"], r["agents"]) for r in shown))
        table = ResultTable(
            "mean until the last token in s, thousand tokens per second and instance, active ranks "
            f"per pass; {shown[0]['scenario']}, cost {cost}, chunk {chunk}",
            ["policy", *(f"load {load:g}, {agents} agents" for load, agents in loads)],
        )
        for policy in dict.fromkeys(r["policy"] for r in shown):
            cells = []
            for load, _ in loads:
                mine = [r for r in shown if (r["policy"], r["load"]) == (policy, load)]
                cells.append(
                    f"{mean_of(mine, 'e2e_mean_s'):.1f} "
                    f"{mean_of(mine, 'tokens_per_s_instance') / 1e3:.1f}K "
                    f"{mean_of(mine, 'active_rank_count'):.2f}"
                )
            table.rows.append([policy, *cells])
        tables.append(table)
    return tables


def class_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """TTFT and goodput of each class and tenant: a row per policy and class, a column per load; a
    table per cost model and chunk size. None where all requests are of one kind."""
    tables = []
    with_classes = [row for row in rows if row.get("classes")]
    for cost, chunk in dict.fromkeys((r["cost"], r["chunk_tokens"]) for r in with_classes):
        shown = [r for r in with_classes if (r["cost"], r["chunk_tokens"]) == (cost, chunk)]
        loads = list(dict.fromkeys(r["load"] for r in shown))
        table = ResultTable(
            f"by class: mean / p99 TTFT in s, share within {shown[0]['slo_s']:g} s; "
            f"{shown[0]['scenario']}, cost {cost}, chunk {chunk}",
            ["policy, class", *(f"load {load:g}" for load in loads)],
        )
        names = dict.fromkeys(name for row in shown for name in row["classes"])
        for policy in dict.fromkeys(r["policy"] for r in shown):
            for name in names:
                cells = []
                for load in loads:
                    mine = [
                        row["classes"][name]
                        for row in shown
                        if (row["policy"], row["load"]) == (policy, load) and name in row["classes"]
                    ]
                    cells.append(
                        f"{mean_of(mine, 'ttft_mean_s'):.3f}/{mean_of(mine, 'ttft_p99_s'):.2f} "
                        f"{mean_of(mine, 'goodput'):.1%}"
                    )
                table.rows.append([f"{policy}, {name}", *cells])
        tables.append(table)
    return tables


def capacity_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """Max QPS at the SLO: a row per policy, a column per chunk size; a table per cost model."""
    tables = []
    for cost in dict.fromkeys(r["cost"] for r in rows):
        shown = [r for r in rows if r["cost"] == cost]
        chunks = sorted({r["chunk_tokens"] for r in shown})
        table = ResultTable(
            f"max QPS of the cluster at mean TTFT {rows[0]['slo_ttft_s']:g} s, chunk use there; "
            f"{rows[0]['scenario']}, cost {cost}",
            ["policy", *(f"chunk {chunk}" for chunk in chunks)],
        )
        for policy in dict.fromkeys(r["policy"] for r in shown):
            cells = []
            for chunk in chunks:
                mine = [r for r in shown if (r["policy"], r["chunk_tokens"]) == (policy, chunk)]
                use = mean_of(mine, "chunk_utilization")
                cells.append(
                    f"{mean_of(mine, 'max_qps'):.1f}" + ("" if math.isnan(use) else f" {use:.0%}")
                )
            table.rows.append([policy, *cells])
        tables.append(table)
    return tables


def decode_table(rows: Sequence[Row]) -> ResultTable:
    """KV band, largest batch and throughput per decode policy."""
    table = ResultTable(
        f"KV tokens per decode rank and throughput; step cost {rows[0]['cost']}",
        ["policy", "band (-/+ 1 sd)", "CV", "peak", "largest batch", "tokens/s"],
    )
    references = [
        name for name in ("round_robin", "skewed") if any(r["policy"] == name for r in rows)
    ]
    table.columns += [f"vs {name}" for name in references]
    for policy in dict.fromkeys(r["policy"] for r in rows):
        mine = [r for r in rows if r["policy"] == policy]
        tokens_per_s = mean_of(mine, "tokens_per_s")
        gains = [
            tokens_per_s / mean_of([r for r in rows if r["policy"] == name], "tokens_per_s") - 1
            for name in references
        ]
        table.rows.append(
            [
                policy,
                f"{mean_of(mine, 'kv_sigma_low') / 1e3:.0f}K-"
                f"{mean_of(mine, 'kv_sigma_high') / 1e3:.0f}K",
                f"{mean_of(mine, 'kv_cv'):.1%}",
                f"{mean_of(mine, 'kv_peak') / 1e3:.0f}K",
                f"{mean_of(mine, 'batch_max'):.1f}",
                f"{tokens_per_s:.0f}",
                *(f"{gain:+.1%}" for gain in gains),
            ]
        )
    bound = mean_of(rows, "balanced_tokens_per_s")
    against = [
        bound / mean_of([r for r in rows if r["policy"] == name], "tokens_per_s") - 1
        for name in references
    ]
    table.rows.append(
        ["perfect balance", *[""] * 4, f"{bound:.0f}", *(f"{gain:+.1%}" for gain in against)]
    )
    return table
