"""Result tables for the terminal and for pages."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from sglang_sbs.simulator.parallel import Row

_Cell = TypeVar("_Cell")


@dataclass(slots=True)
class ResultTable:
    """A table of text; the first column is a name."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def print(self, console: Console) -> None:
        table = Table(title=self.title)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)


def crossed(
    title: str,
    first: str,
    columns: Mapping[Any, str],
    cells: Mapping[tuple[Any, ...], _Cell],
    words: Callable[[_Cell], str],
) -> ResultTable:
    """Build a table with a row per name, in their order in ``cells``, which has the keys (name,
    column). ``columns``: headings by column. Cells that are missing, e.g. after an interrupt, are
    empty."""
    names = dict.fromkeys(name for name, _ in cells)
    rows = [
        [
            name,
            *(words(cells[name, column]) if (name, column) in cells else "" for column in columns),
        ]
        for name in names
    ]
    return ResultTable(title, [first, *columns.values()], rows)


def mean_of(rows: Sequence[Row], key: str) -> float:
    """Return the mean of a field over the rows that have a value; NaN if none has."""
    values = [row[key] for row in rows if row[key] is not None and not math.isnan(row[key])]
    return statistics.fmean(values) if values else math.nan


def groups(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of some fields in order of appearance, omitting fields that no row
    has."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return found


def result_tables(rows: Sequence[Row]) -> list[ResultTable]:
    found_any = any(row["hit_rate"] > 0 for row in rows)
    return [
        *load_tables(rows),
        *_day_tables(rows),
        *_by_load(
            rows,
            "active DP ranks per pass, tokens of the heaviest rank / mean",
            lambda mine: means(mine, "{:.2f} {:.2f}", "active_rank_count", "max_over_mean"),
        ),
        *_by_load(
            [row for row in rows if "agents" in row],
            "mean until the last token in s, thousand tokens per second and instance, active ranks "
            "per pass",
            _loop_cell,
            column="load {load:g}, {agents} agents",
        ),
        *_by_load(
            [row for row in rows if "sent_tokens" in row],
            "thousand prompt tokens sent to decode per request, largest batch and KV of the decode "
            "ranks / mean",
            _decode_cell,
        ),
        *_class_tables([row for row in rows if row.get("classes")]),
        *_by_load(rows if found_any else [], "hit rate, computed / optimum", _cache_cell),
        *_by_load(
            [row for row in rows if "pools" in row],
            "p50 / p99 of one decision in ms of CPU, cores of the busiest scheduler, requests of "
            "the largest pool / mean",
            _pool_cell,
            of="{pools} pools",
        ),
    ]


def load_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """Return tables of mean and p99 TTFT, chunk utilization and refusals by load."""
    return _by_load(rows, "mean / p99 TTFT in s, chunk use", _load_cell)


def _by_load(
    rows: Sequence[Row],
    title: str,
    cell: Callable[[Sequence[Row]], str],
    *,
    first: str = "policy",
    column: str = "load {load:g}",
    of: str = "{scenario}",
) -> list[ResultTable]:
    """Build tables with a row per policy and a column per load; one per cost model and chunk
    size."""
    return [
        crossed(
            f"{title}; {of.format(**shown[0])}, cost {cost}, chunk {chunk}",
            first,
            {row["load"]: column.format(**row) for row in shown},
            groups(shown, "policy", "load"),
            cell,
        )
        for (cost, chunk), shown in groups(rows, "cost", "chunk_tokens").items()
    ]


def means(mine: Sequence[Row], form: str, *keys: str) -> str:
    """Format the means of these fields over the rows; empty if the first field has no value."""
    found = [mean_of(mine, key) for key in keys]
    return "" if math.isnan(found[0]) else form.format(*found)


def _load_cell(mine: Sequence[Row]) -> str:
    if math.isnan(mean_of(mine, "ttft_mean_s")):
        arrived = any(r["rejected"] or r["unfinished"] for r in mine)
        return "nothing completed" if arrived else "no arrivals after warm-up"
    refused = sum(r["rejected"] for r in mine) / sum(r["completed"] + r["rejected"] for r in mine)
    return (
        means(mine, "{:.3f}/{:.2f}", "ttft_mean_s", "ttft_p99_s")
        + means(mine, " {:.0%}", "chunk_utilization")
        + (f" ({refused:.0%} refused)" if refused else "")
        + (" (saturated)" if any(r["unfinished"] for r in mine) else "")
    )


def _pool_cell(mine: Sequence[Row]) -> str:
    p50_s, p99_s = mean_of(mine, "decision_p50_s"), mean_of(mine, "decision_p99_s")
    shares = means(mine, "{:.2f} {:.2f}", "decision_share", "pool_max_over_mean")
    return f"{1e3 * p50_s:.2f}/{1e3 * p99_s:.2f} {shares}"


def _cache_cell(mine: Sequence[Row]) -> str:
    optimal = sum(r["optimal_tokens"] for r in mine)
    computed = sum(r["computed_tokens"] for r in mine)
    return f"{mean_of(mine, 'hit_rate'):.0%} {computed / optimal:.2f}" if optimal else ""


def _loop_cell(mine: Sequence[Row]) -> str:
    e2e_s, tokens = mean_of(mine, "e2e_mean_s"), mean_of(mine, "tokens_per_s_instance")
    return f"{e2e_s:.1f} {tokens / 1e3:.1f}K {mean_of(mine, 'active_rank_count'):.2f}"


def _decode_cell(mine: Sequence[Row]) -> str:
    balance = means(mine, "{:.2f} {:.2f}", "decode_batch_max_over_mean", "decode_kv_max_over_mean")
    return f"{mean_of(mine, 'sent_tokens') / 1e3:.1f}K {balance}"


def _class_cell(mine: Sequence[Row]) -> str:
    some = [row["of_class"] for row in mine if row["of_class"] is not None]
    ttft_s, p99_s = mean_of(some, "ttft_mean_s"), mean_of(some, "ttft_p99_s")
    return f"{ttft_s:.3f}/{p99_s:.2f} {mean_of(some, 'goodput'):.1%}"


def _class_tables(rows: Sequence[Row]) -> list[ResultTable]:
    split = [
        {**row, "policy": f"{row['policy']}, {name}", "of_class": row["classes"].get(name)}
        for row in rows
        for name in dict.fromkeys(name for other in rows for name in other["classes"])
    ]
    slo_s = split[0]["slo_s"] if split else 0.0
    title = f"by class: mean / p99 TTFT in s, share within {slo_s:g} s"
    return _by_load(split, title, _class_cell, first="policy, class")


def _day_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """Show how each policy follows a load that rises and falls: a row per policy and mean load, a
    column per part of the day; one table per cost model and chunk size."""
    tables = []
    of_days = [row for row in rows if "ttft_by_part_s" in row]
    for (cost, chunk), shown in groups(of_days, "cost", "chunk_tokens").items():
        parts = len(shown[0]["ttft_by_part_s"])
        cells = {
            (f"{policy}, {load:g}", part): statistics.fmean(r["ttft_by_part_s"][part] for r in mine)
            for (policy, load), mine in groups(shown, "policy", "load").items()
            for part in range(parts)
        }
        title = f"mean TTFT in s by part of the day; cost {cost}, chunk {chunk}"
        heads = {part: f"{part + 1}/{parts}" for part in range(parts)}
        tables.append(crossed(title, "policy, mean load", heads, cells, "{:.3f}".format))
    return tables


def capacity_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """Maximum QPS at the SLO: a row per policy, a column per chunk size; one table per cost
    model."""
    slo_s, scenario = rows[0]["slo_ttft_s"], rows[0]["scenario"]
    title = f"max QPS of the cluster at mean TTFT {slo_s:g} s, chunk use there; {scenario}, cost"
    return [
        crossed(
            f"{title} {cost}",
            "policy",
            {chunk: f"chunk {chunk}" for chunk in sorted({r["chunk_tokens"] for r in shown})},
            groups(shown, "policy", "chunk_tokens"),
            lambda mine: (
                f"{mean_of(mine, 'max_qps'):.1f}{means(mine, ' {:.0%}', 'chunk_utilization')}"
            ),
        )
        for (cost,), shown in groups(rows, "cost").items()
    ]
