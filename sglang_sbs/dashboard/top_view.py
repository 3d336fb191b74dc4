"""Renders a frame as terminal lines. Text from other parties (worker URLs, reasons, ids) is shown
without control characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.rule import Rule
from rich.text import Text

from sglang_sbs.explain.words import PART_NAMES

Line = Text | Rule

_NAME_CHARS = 24
_BEFORE_CELLS = 56
"""Width, in characters, of what precedes the ranks' cells in a line: name, state and figures."""
_LEAST_KV = 128 * 1024
_STEPS = " ▁▂▃▄▅▆▇█"
_COLOURS = ("blue", "cyan", "green", "yellow", "red")
_LEVELS = {"green": ("●", "green"), "amber": ("▲", "yellow"), "red": ("●", "bold red")}
_TTFT = (
    ("measured", "here, measured"),
    ("modelled", "here, by the same model"),
    ("eta", "immediate, eta (est.)"),
    ("least_tokens", "immediate, least tokens (est.)"),
    ("round_robin", "immediate, round robin (est.)"),
)


@dataclass(frozen=True, slots=True)
class TopView:
    """A rich renderable that shows as much of the last frame as fits."""

    frame: dict[str, Any]
    note: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        height = options.height or console.size.height
        most = max(10, height - 1)
        lines = self._lines(width, most)
        if len(lines) > most:
            cut = f"{len(lines) - most + 1} lines more: a higher terminal shows them"
            lines[most - 1 :] = [Text(cut, style="yellow")]
        yield Group(*(_clip(line, width) for line in lines))

    def _lines(self, width: int, height: int) -> list[Line]:
        frame = self.frame
        head = _header(frame, self.note)
        first = frame["well"]["kind"], frame["well"]["subject"]
        others = [alert for alert in frame["alerts"] if (alert["kind"], alert["subject"]) != first]
        alerts = _alerts(others, 3 if height < 40 else 10)
        ttft = _ttft(frame["ttft"])
        past = _past(frame.get("past", []), frame, 4) if height >= 36 else []
        room = height - len(head) - len(alerts) - len(past) - len(ttft) - 4  # rules
        slowest = frame["slowest"][: max(2, room // 3)]
        prefill, decode = frame["prefill"], frame["decode"]
        # As on the page: a low load is shown as low, even if no rank has more.
        fullest = max([kv for instance in decode for kv in instance["kv"]], default=0)
        fullest = max(_LEAST_KV, fullest)
        shares = _share(max(4, room - max(1, len(slowest))), len(prefill), len(decode))
        return [
            *head,
            *alerts,
            *past,
            _rule("prefill: C_avail used per DP rank" + _grouped(prefill, "c_avail", width)),
            *_ranks(prefill, width, shares[0], _prefill),
            _rule("decode: KV per DP rank" + _grouped(decode, "kv", width)),
            *_ranks(decode, width, shares[1], partial(_decode, fullest=fullest)),
            _rule("time to prefill's answer, last minute"),
            *ttft,
            _rule("slowest requests of the last 5 minutes"),
            *_slowest(slowest, frame["now_s"]),
        ]


def plain(text: object) -> str:
    """Replace all characters that a terminal would interpret."""
    return "".join(c if c.isprintable() else "·" for c in str(text))


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value:.0f}ms" if abs(value) < 1 else f"{value:.1f}s"


def _name(instance: dict[str, Any]) -> Text:
    name = _short(instance["instance"])
    if len(name) > _NAME_CHARS:
        name = "…" + name[1 - _NAME_CHARS :]
    line = Text(f"{name:<{_NAME_CHARS}} ", style="" if instance["up"] else "dim")
    line.append("up   " if instance["up"] else "DOWN ", style="green" if instance["up"] else "red")
    return line


def _grouped(instances: Sequence[dict[str, Any]], per_rank: str, width: int) -> str:
    """Return the part of the heading with the number of DP ranks per cell of the bar;
    empty if one. ``per_rank``: field with the list of the ranks' values."""
    room = width - _BEFORE_CELLS
    most = max((len(instance[per_rank]) for instance in instances), default=0)
    if room <= 0 and most:
        return ": a wider terminal has room"
    group = -(-most // max(1, room))
    return f", up to {group} a cell" if group > 1 else ""


def _short(url: str) -> str:
    return plain(url.removeprefix("http://").removeprefix("https://"))


def _rule(title: str) -> Rule:
    return Rule(Text(title, style="dim"), align="left", style="dim", characters="─")


def _clip(line: Line, width: int) -> Line:
    if isinstance(line, Text):
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return line


def _header(frame: dict[str, Any], note: str) -> list[Line]:
    queue, timing, hold = frame["queue"], frame["timing"], frame["hold"]
    policy = f"{plain(frame['policy'])}/{plain(frame['trigger'])} "
    lead = _lead(frame.get("lead"))
    first = Text.assemble(("sglang-sbs ", "bold"), policy, lead, (plain(note), "dim"))
    second = Text(
        f"waiting {queue['requests']:,} ({queue['tokens']:,} tokens), oldest "
        f"{seconds(queue['oldest_wait_s'])}; in flight {queue['in_flight']:,}; "
        f"{frame['rates']['dispatched_per_s']:.1f}/s{_classes(queue)}"
    )
    third = Text(
        f"I_opt {seconds(timing['interval_s'])}  T_fwd {seconds(timing['mean_forward_s'])}  "
        f"L_net {seconds(timing['latency_s'])}  lead {seconds(timing['lead_s'])}  "
        f"held p50 {seconds(hold.get('p50'))} p95 {seconds(hold.get('p95'))}"
        f"{_balance(frame.get('balance'))}"
    )
    gain = _gain(frame["gain"], frame.get("trial"))
    return [first, _well(frame["well"]), *gain, *_split(frame["split"]), second, third]


def _well(well: dict[str, Any]) -> Text:
    mark, style = _LEVELS[well["level"]]
    if well["level"] == "green":
        return Text.assemble((f"{mark} all is well: ", style), plain(well["cause"]))
    subject = f"{_short(well['subject'])}: " if well["subject"] else ""
    todo = f": {plain(well['todo'])}" if well["todo"] else ""
    return Text.assemble((f"{mark} ", style), subject, plain(well["cause"]), todo)


def _gain(gain: dict[str, Any], trial: dict[str, Any] | None) -> list[Line]:
    """The gain of SBS in a line, and the state of a running trial. A trial's verdict is measured,
    so it replaces the estimate."""
    lines: list[Line] = []
    if trial is not None and (trial["running"] or trial["high"] is not None):
        now, left = trial["now"], seconds(trial["slot_left_s"])
        slot = f"; now {plain(trial[now])} for {left}" if now in ("policy", "baseline") else ""
        lines.append(Text(plain(trial["text"]) + slot))
    return lines if trial is not None and trial["high"] is not None else lines + _estimate(gain)


def _estimate(gain: dict[str, Any]) -> list[Line]:
    known = gain["baselines"]
    if not known:
        return [Text(f"gain: {plain(gain['why'])}", style="dim")]
    shown = ", ".join(
        f"{ratio['ratio']:.2f}x of {plain(name)} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        for name, ratio in known.items()
        if name in (gain["headline"], "eta")
    )
    why = f"; {plain(gain['why'])}" if gain["why"] else ""
    return [Text(f"gain: mean TTFT {shown}, {gain['trend']}{why}")]


def _split(split: dict[str, Any]) -> list[Line]:
    """Parts of the time to the first token in a line for typical and one for slow requests, the
    longest first."""
    lines: list[Line] = []
    for name in ("p50", "p99"):
        if name in split:
            parts = sorted(split[name]["parts_s"].items(), key=lambda part: -part[1])
            shown = ", ".join(f"{PART_NAMES.get(key, key)} {seconds(s)}" for key, s in parts)
            lines.append(Text(f"TTFT {name} {seconds(split[name]['ttft_s'])}: {shown}"))
    return lines or [Text("TTFT: no request had a first token yet", style="dim")]


def _balance(balance: dict[str, float] | None) -> str:
    if not balance:
        return ""
    return (
        f"  active ranks {balance['active_ranks']:.1f} of {balance['ranks']:.0f}"
        f" (max/mean {balance['max_over_mean']:.2f})"
    )


def _lead(lead: dict[str, Any] | None) -> str:
    if not lead:
        return ""
    return f"by {plain(lead['address'])}, term {lead['term']} since {seconds(lead['for_s'])} "


def _classes(queue: dict[str, Any]) -> str:
    """Waiting requests by class and tenant, if requests differ."""
    classes, tenants = queue.get("classes", {}), queue.get("tenants", 0)
    high, low = classes.get("high", 0), classes.get("low", 0)
    shown = f"; {high:,} high, {low:,} low" if high or low else ""
    return shown + (f"; {tenants:,} tenants" if tenants > 1 else "")


def _alerts(alerts: list[dict[str, Any]], most: int) -> list[Line]:
    lines: list[Line] = []
    for alert in alerts[:most]:
        critical = alert["severity"] == "critical"
        line = Text("● " if critical else "▲ ", style="bold red" if critical else "yellow")
        subject = f"{_short(alert['subject'])}: " if alert["subject"] else ""
        todo = f": {plain(alert['todo'])}" if alert.get("todo") else ""
        line.append(subject + plain(alert["text"]) + todo)
        lines.append(line)
    if len(alerts) > most:
        lines.append(Text(f"  and {len(alerts) - most} alerts more", style="yellow"))
    return lines


def _cells(line: Text, shares: list[float], instance: dict[str, Any], room: int) -> None:
    """Draw one character per rank or, if there are more ranks than cells, per group (its fullest
    rank)."""
    if room <= 0 or not shares:
        return
    ages: list[float | None] = instance["age"]
    group = -(-len(shares) // room)
    for start in range(0, len(shares), group):
        share = max(shares[start : start + group])
        age_s = [age for age in ages[start : start + group] if age is not None]
        level = max(0, min(len(_STEPS) - 1, round(share * (len(_STEPS) - 1))))
        colour = _COLOURS[max(0, min(len(_COLOURS) - 1, int(share * len(_COLOURS))))]
        if age_s and max(age_s) > instance["stale_s"]:
            line.append("!", style="bold red reverse")
        elif not age_s:
            line.append("?", style="dim")
        else:
            line.append(_STEPS[level] if level else "·", style=colour)


def _oldest(ages: list[float | None]) -> str:
    known = [age for age in ages if age is not None]
    return seconds(max(known)) if known else "never"


def _prefill(state: dict[str, Any]) -> tuple[str, list[float]]:
    """Return the text about a prefill instance, and the load of its ranks as shares."""
    free = sum(max(0, tokens) for tokens in state["c_avail"])
    shown = f"{free:>7,} free, seen {_oldest(state['age']):>6} "
    if not state.get("barrier", True):
        shown += f"{len(state['c_avail'])} ranks, no barrier "
    chunk = state["chunk"]
    return shown, [1 - tokens / chunk if chunk else 0.0 for tokens in state["c_avail"]]


def _decode(state: dict[str, Any], fullest: int) -> tuple[str, list[float]]:
    shown = f"B {sum(state['running']):>5,} K {sum(state['kv']):>9,} {_oldest(state['age']):>5} "
    return shown, [kv / (state["kv_capacity"] or fullest) for kv in state["kv"]]


def _ranks(
    instances: list[dict[str, Any]],
    width: int,
    room: int,
    describe: Callable[[dict[str, Any]], tuple[str, list[float]]],
) -> list[Line]:
    lines: list[Line] = []
    for instance in instances[:room]:
        line = _name(instance)
        shown, shares = describe(instance)
        line.append(shown)
        _cells(line, shares, instance, width - len(line))
        lines.append(line)
    if len(lines) < len(instances):
        more = len(instances) - len(lines) + 1
        lines[-1:] = [Text(f"and {more} more: a higher terminal shows them")]
    return lines or [Text("none", style="dim")]


def _share(room: int, first: int, second: int) -> tuple[int, int]:
    given = min(first, max(room // 2, room - second))
    return max(1, given), max(1, min(second, room - given))


def _ttft(ttft: dict[str, Any]) -> list[Line]:
    figures = ttft["figures"]
    if not figures:
        return [Text("nothing to compare yet", style="dim")]
    lines: list[Line] = []
    for name, label in _TTFT:
        figure = figures[name]
        text = f"{label:<31} p50 {seconds(figure['p50']):>6}  p95 {seconds(figure['p95']):>6}"
        if name == "modelled":
            off = figure["mean"] / max(1e-6, figures["measured"]["mean"]) - 1
            text += f"  ({off:+.0%} off)"
        lines.append(Text(text, style="dim" if name == "modelled" else ""))
    return lines


def _slowest(slowest: list[dict[str, Any]], now_s: float) -> list[Line]:
    if not slowest:
        return [Text("no request had a first token yet", style="dim")]
    return [
        Text(
            f"{seconds(slow['ttft_s']):>6} {max(0.0, now_s - slow['ended_s']):>3.0f}s ago: "
            f"{plain(slow['why'])}; {plain(slow['rid'])}"
        )
        for slow in slowest
    ]


def _past(past: list[dict[str, Any]], frame: dict[str, Any], most: int) -> list[Line]:
    """Ended alerts of the last hour."""
    if not past:
        return []
    lines: list[Line] = [_rule(f"wrong in the last hour, and over: {len(past)}")]
    zero_s = frame["time_s"] - frame["now_s"]
    for alert in past[:most]:
        span = "-".join(
            f"{datetime.fromtimestamp(zero_s + alert[name]):%H:%M:%S}"
            for name in ("began_s", "ended_s")
        )
        subject = f"{_short(alert['subject'])}: " if alert["subject"] else ""
        style = "red" if alert["severity"] == "critical" else "yellow"
        lines.append(Text.assemble((f"{span} ", style), subject, plain(alert["text"])))
    return lines
