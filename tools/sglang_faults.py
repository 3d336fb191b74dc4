"""Faults of SGLang that this project works around: effect, place, and when each workaround can go.

A module that works around one has a comment ``# SGLang fault: NAME`` at the line that does, so
``grep`` finds all of it. The table is the one of ``docs/architecture.md``; ``python -m
tools.sglang_faults`` prints it, and a test compares. An upstream number is an issue or pull request
of sgl-project/sglang that shows the fault; it may be open, closed without a fix, or the change that
brought it.
"""

from __future__ import annotations

from dataclasses import dataclass

NEWEST = "0.5.23"
"""The newest release that the table was compared with."""


@dataclass(frozen=True)
class Fault:
    name: str
    symptom: str
    first: str | None
    """The oldest release in which it was seen or read; ``None``: it is only proposed upstream."""
    last: str | None
    """The last release that has it; ``None``: :data:`NEWEST` has it."""
    upstream: tuple[int, ...]
    """Empty: not reported, as far as was searched."""
    modules: tuple[str, ...]
    """Modules that work around it, below ``sglang_sbs/``."""
    goes: str
    """When the workaround can be taken out."""

    def releases(self) -> str:
        if self.first is None:
            return "proposed"
        return self.first if self.first == NEWEST else f"{self.first} to {self.last or NEWEST}"


FAULTS = (
    Fault(
        "lost-handshake",
        "Two threads of a prefill rank write a request's status without a lock. Decode's answer is "
        "overwritten, and the request waits 300 s for its time-out.",
        "0.5.11",
        None,
        (19205,),
        ("engine/room_status.py",),
        "`CommonKVManager.update_status` locks, or compares before it writes",
    ),
    Fault(
        "rust-idle-sleep",
        "An idle DP rank of the Rust server sleeps until a request of its own comes, for up to "
        "1 s. The other ranks under DP attention wait for it.",
        "0.5.17",
        None,
        (),
        ("engine/install.py",),
        "the idle sleeper wakes for the other DP ranks, or is off with DP attention",
    ),
    Fault(
        "rust-rid-suffix",
        "The Rust server appends `#` and 16 digits to a request id, so the router that sent it "
        "does not know it again.",
        "0.5.23",
        None,
        (),
        ("engine/collect.py",),
        "the scheduler of the Rust server sees ids as they were sent",
    ),
    Fault(
        "arrival-left-behind",
        "The time at which the HTTP server got a request does not travel with it to the scheduler.",
        "0.5.11",
        None,
        (),
        ("engine/collect.py",),
        "`ReqTimeStats.__getstate__` includes `created_time`",
    ),
    Fault(
        "sticky-extend-count",
        "A decode batch keeps `extend_num_tokens` of the prefill batch that was merged into it.",
        "0.5.23",
        None,
        (),
        ("engine/collect.py",),
        "the field is 0 or `None` on decode batches",
    ),
    Fault(
        "messages-without-rid",
        "`/v1/messages` takes no request id in its body, so an abort by id finds nothing.",
        "0.5.20",
        None,
        (),
        ("engine/__init__.py", "router/requests/plan.py"),
        "the body has `rid`, or header overrides are on by default",
    ),
    Fault(
        "stale-prefill-ports",
        "Decode keeps the ports of a prefill instance under its host. It misses a restart within "
        "some 10 s and talks to ports of the old process, until requests time out.",
        "0.5.6",
        None,
        (36029, 34289),
        ("router/workers/host_spelling.py",),
        "decode compares an id of the prefill process before it uses the ports. From 0.5.20 on it "
        "asks anew after a failed request, so the first requests still fail",
    ),
    Fault(
        "kv-freed-in-transfer",
        "Decode frees the KV pages of an aborted request while prefill still writes to them. The "
        "next request on these pages answers from another request's KV, with status 200.",
        "0.5.6",
        "0.5.21",
        (24527, 27372, 32564, 35049, 38961),
        ("router/relay/parking.py",),
        "0.5.22 is the oldest release supported (mooncake and nixl: 0.5.21), and other transfer "
        "backends defer the release as well",
    ),
    Fault(
        "refused-room-stays",
        "Decode announces a request to prefill at once. If prefill then refuses the request, its "
        "ranks keep the bootstrap room for good.",
        "0.5.6",
        None,
        (39428,),
        (
            "router/relay/attempts.py",
            "router/requests/engine_refusals.py",
            "router/workers/worker.py",
        ),
        "prefill forgets what was announced for a request that it refuses",
    ),
    Fault(
        "retraction-without-key",
        "A decode engine that retracts a request asks prefill over plain HTTP and without a key to "
        "compute it again. A prefill engine with a key or TLS refuses, and the stream ends early.",
        "0.5.16",
        None,
        (25372, 40730),
        ("router/relay/pair.py", "router/relay/in_flight.py", "router/workers/server_info.py"),
        "the engine's own request carries the key and uses TLS",
    ),
    Fault(
        "internal-fields-of-clients",
        "Engines believe internal fields in a client's body: one number ends some engines.",
        "0.5.23",
        None,
        (),
        ("router/requests/plan.py",),
        "the HTTP server drops fields that only SGLang's own processes set",
    ),
    Fault(
        "duplicate-room",
        "Two requests with one bootstrap room end the schedulers of both engines.",
        "0.5.23",
        None,
        (40125,),
        ("router/requests/plan.py",),
        "a second request with a room in use is refused",
    ),
    Fault(
        "samples-share-a-room",
        "With `n > 1` all samples get one bootstrap room, and the request hangs.",
        "0.5.6",
        None,
        (9224, 24223, 26486, 30723, 40297),
        ("router/requests/splitting.py",),
        "every sample has a room of its own",
    ),
    Fault(
        "abort-by-prefix",
        "An abort hits every request whose id begins with the given one: `a1` ends `a10` too.",
        "0.5.6",
        None,
        (30912,),
        ("router/relay/aborts.py",),
        "the scheduler compares whole ids unless asked for a prefix",
    ),
    Fault(
        "early-abort-ignored",
        "An abort that comes while the engine tokenizes the request is ignored.",
        "0.5.23",
        None,
        (),
        ("router/relay/pair.py",),
        "the tokenizer process remembers it until the request is sent on",
    ),
    Fault(
        "abort-as-success",
        "An aborted request is answered with status 200, and under `/v1/messages` as if it had "
        "ended by itself.",
        "0.5.23",
        None,
        (30233, 33507),
        ("router/relay/answer_kinds.py",),
        "an abort is an error in every endpoint",
    ),
    Fault(
        "pool-full-looks-idle",
        "A prefill rank whose KV pool is full forms no batch, runs nothing, and so looks free.",
        "0.5.23",
        None,
        (38478,),
        ("scheduling/prefill/stalled_work.py", "scheduling/prefill/rank.py"),
        "engines report why no batch could be formed",
    ),
    Fault(
        "collector-after-start",
        "Without a warm-up request, garbage collections stop the HTTP process for about 0.5 s.",
        "0.5.23",
        None,
        (),
        ("cluster/readiness.py",),
        "the server freezes the collector once it listens, warm-up or not",
    ),
    Fault(
        "rank-is-a-hint",
        "Prefill takes the named DP rank as a hint, and decode then asks the wrong rank.",
        None,
        None,
        (35964,),
        ("router/workers/served_ranks.py", "scheduling/prefill/moves.py"),
        "it is merged and `/server_info` shows its flag, or it is rejected",
    ),
    Fault(
        "queued-work-moves",
        "A queued request moves to another DP rank after prefill accepted it.",
        None,
        None,
        (37401,),
        ("scheduling/prefill/moves.py",),
        "it is rejected; if it is merged, engines report the move",
    ),
)


def header() -> list[str]:
    titles = ("fault", "effect", "releases", "upstream", "worked around in", "can go when")
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]


def rows() -> list[str]:
    return [
        f"| `{fault.name}` | {fault.symptom} | {fault.releases()} | "
        f"{', '.join(f'#{number}' for number in fault.upstream) or 'not reported'} | "
        f"{', '.join(f'`{module}`' for module in fault.modules)} | {fault.goes} |"
        for fault in FAULTS
    ]


if __name__ == "__main__":
    print("\n".join([*header(), *rows()]))
