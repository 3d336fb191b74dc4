"""An engine behind some router, as EndForward messages; and a small observed log made of them.

The engine has two prefill DP ranks that share a barrier. Its clock is 500 s behind the observer's,
and every message takes 2 ms.
"""

from __future__ import annotations

from pathlib import Path

from sglang_sbs.observe.recorder import TrafficRecorder
from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import Accepted, Started

BEHIND_S = 500.0
TRANSIT_S = 0.002
PREFILL = "http://p0:30000"
DECODE = "http://d0:30000"


class Rank:
    """Makes one rank's messages and gives them to a recorder. Times are the engine's clock."""

    def __init__(
        self, recorder: TrafficRecorder, dp_rank: int, *, role: str = "prefill", **fixed
    ) -> None:
        self.recorder = recorder
        self.seq = 0
        name = DECODE if role == "decode" else PREFILL
        self.fixed = {
            "instance_id": name,
            "boot_id": f"boot of {name}",
            "role": role,
            "dp_rank": dp_rank,
            "dp_size": 2,
            "chunk_tokens": 1024,
            **fixed,
        }

    def say(self, at_s: float, kind: str = "heartbeat", *, transit_s=TRANSIT_S, **fields) -> None:
        fields.setdefault("rids", [request.rid for request in fields.get("accepted", [])])
        message = EndForward(**self.fixed, seq=self.seq, kind=kind, **({"sent_s": at_s} | fields))
        self.seq += 1
        self.recorder.receive(message, at_s + BEHIND_S + transit_s)

    def pass_(self, number: int, launch_s: float, end_s: float, tokens: int, **fields) -> None:
        started = fields.pop("started", [])
        common = {"forward_id": number, "launch_s": launch_s, "extend_tokens": tokens}
        self.say(launch_s + 0.001, "launch", started=started, age_s=0.001, **common)
        times = {"end_s": end_s, "forward_s": end_s - launch_s, "age_s": 0.0}
        self.say(end_s, "forward", **common, **times, **fields)


def hear_three_requests(recorder: TrafficRecorder) -> None:
    """``a`` (1,500 tokens, 100 of them cached, so two passes) and ``c`` go to rank 0, ``b`` (300
    tokens) to rank 1. Passes take 0.2 s; ``c`` arrives during the first and waits for it."""
    ranks = [Rank(recorder, 0), Rank(recorder, 1)]
    decode = Rank(recorder, 1, role="decode")
    ranks[0].say(10.001, accepted=[Accepted("a", 1500, 10.0, room=71)])
    ranks[1].say(10.005, accepted=[Accepted("b", 300, 10.004, room=72)])
    decode.say(10.006, accepted=[Accepted("other-a", 1500, 10.0, 64, room=71)])
    started = [Started("a", 10.0, 10.01, cached_tokens=100)]
    ranks[0].pass_(1, 10.01, 10.21, 1024, started=started)
    ranks[1].pass_(1, 10.01, 10.21, 300, started=[Started("b", 10.004, 10.01)], finished=["b"])
    ranks[0].say(10.211, accepted=[Accepted("c", 200, 10.11)])
    more = [Started("c", 10.2, 10.21)]
    ranks[0].pass_(2, 10.22, 10.42, 576, started=more, finished=["a", "c"])
    ranks[1].pass_(2, 10.22, 10.42, 0)


def write_sample(path: Path) -> None:
    """The event log that ``observe`` writes of :func:`hear_three_requests`."""
    recorder = TrafficRecorder()
    hear_three_requests(recorder)
    log = EventLogWriter(path, SchedulerConfig(), observed=True)
    for record in recorder.due(float("inf")):
        log.write(record.now_s, record.event, record.commands)
    log.close()
