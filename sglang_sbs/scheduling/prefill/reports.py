"""Corrects the assumed state of a prefill instance by its EndForward messages.

A dispatched request is *in flight* until its rank reports that it accepted it (``rids``). Then it
is part of the rank's reported queue (absolute numbers, never summed here), and with a launch it
leaves both and is part of a :class:`Pass`. EndForward ends the pass. So every report replaces
assumptions by facts, and a lost one is healed by the next. Until then, another rank's report of the
same pass applies to this one as well. Latency and lead are learned only from a rank's own reports.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang_sbs.scheduling.prefill.moves import Moves, Stray
from sglang_sbs.scheduling.prefill.observation import Observation, observe_launch
from sglang_sbs.scheduling.prefill.passes import MOST_PASSES, Pass, Passes
from sglang_sbs.scheduling.prefill.rank import MOST_TAKEN, PrefillRank
from sglang_sbs.scheduling.prefill.ranks import Ranks
from sglang_sbs.scheduling.received.report_cursor import SILENT_S, Taken
from sglang_sbs.wire import EndForward

_CREDIT = 10.0
"""Device time that an instance may have used before it was observed, in default forward times."""


class Reports:
    """Applies the EndForward reports of one instance to its ranks and passes."""

    def __init__(self, ranks: Ranks, passes: Passes, moves: Moves, t_default_s: float) -> None:
        self._ranks = ranks
        self._passes = passes
        self._moves = moves
        self._device = DeviceTime(t_default_s)
        self._presumed_id = -1
        """Forward id of the newest pass that was applied to all ranks from one rank's report."""

    def read(
        self,
        report: EndForward,
        taken: Taken,
        now_s: float,
        *,
        lost_s: float,
        strays: Sequence[Stray],
    ) -> Observation:
        """Replace assumptions by a rank's report, and return the samples in it. ``taken``: whether
        the engine restarted, and acceptances in lost messages. ``lost_s``: age at which a request
        that the rank has not named no longer counts. ``strays``: requests that the rank names and
        that are assumed elsewhere."""
        rank, passes = self._ranks[report.dp_rank], self._passes
        if taken.restarted:
            self._on_restart(rank)
        self._device.on_report(now_s)
        report = self._plausible(rank, report)
        rank.clean = rank.unanswered = False
        rank.stalled.observe(report, now_s)
        of_launch, rests = report.kind == "launch", report.kind in ("idle", "heartbeat")
        inflight = 0 if of_launch else report.inflight_passes
        # Presumptions are reverted first, so that the requests they took are in flight again when
        # the report names or counts them.
        rank.on_reported_id(report.forward_id + inflight)
        if rests and report.idle and all(other.idle for other in self._ranks if other is not rank):
            self._take_presumed_back()  # requests that the rank does not name have not arrived
        launch_s = self._launched_s(report, now_s)
        if of_launch:
            # Before the launch is a pass, while the time since the last end is still known.
            self._learn_pause(report, launch_s)
            passes.pause.end()
        # Moved requests are entered first, so that no other request is acknowledged for them.
        moved = self._moves.follow(self._ranks, report.dp_rank, strays) if strays else []
        lost = self._moves.settle(report, taken.lost_requests)
        learned = self._acknowledge(rank, report, lost, launch_s)
        learned.restarted, learned.moved = taken.restarted, moved
        rank.give_up(now_s - lost_s)
        # After the acknowledgement, because the queue consists of the requests that are here and
        # not in flight.
        rank.on_queue(report)
        rank.idle = report.idle
        for running in passes:
            if running.forward_id is None:
                running.queued[report.dp_rank] = 0  # the reported queue is without these tokens
        if of_launch:
            self._on_launch(report, now_s)
        elif report.kind == "forward":
            self._on_end(rank, report, now_s, learned)
        # Passes that this report does not know take from its queue, so they come last.
        rank.presume_again(rank.chunk_tokens)
        self._presume_of_all(report)
        if rests and not inflight:
            passes.pause.rests(report.forward_id)
        if rests and not passes.reported:
            self._forget_silent(now_s - SILENT_S)
        return learned

    def _on_restart(self, rank: PrefillRank) -> None:
        """Handle a new boot id of a rank: forward ids start anew, and its requests are lost unless
        they were sent after the instance went down."""
        if not rank.clean:
            rank.forget()
            rank.prompts.clear()
        self._moves.clear()
        self._forget_ids()

    def _forget_ids(self) -> None:
        """Forget all passes and forward ids of the instance, because ids start anew."""
        self._passes.clear()
        self._presumed_id = -1
        self._passes.pause.forget_ids()
        for rank in self._ranks:
            rank.new_boot()

    def _plausible(self, rank: PrefillRank, report: EndForward) -> EndForward:
        """Return the report clamped to possible values. If it shows that an earlier report was
        false, forget all passes first."""
        if rank.contradicts(report):
            self._forget_ids()
        most = 2 * rank.chunk_tokens
        if report.extend_tokens > most or max(report.tokens_per_rank or [0]) > most:
            # Without chunking a rank computes whole prompts.
            most = max(most, self._ranks.longest_prompt_tokens)
        return within_limits(report, most, len(self._ranks))

    def _forget_silent(self, before_s: float) -> None:
        """Discard the last reports of ranks that have not reported since ``before_s`` while others
        have."""
        ranks = self._ranks
        silent = [rank for rank in ranks if (rank.cursor.reported_s or before_s) < before_s]
        if silent:
            newest = max([rank.newest_id for rank in ranks if rank not in silent], default=-1)
            if max([rank.newest_id for rank in silent]) > newest:
                self._forget_ids()  # otherwise others would be ahead of it
            for rank in silent:
                rank.fell_silent()

    def _take_presumed_back(self) -> None:
        """Drop all presumed passes, because a report replaces them. Their unacknowledged requests
        are in flight again."""
        presumed = self._passes.take_presumed()
        for index, rank in enumerate(self._ranks if presumed else ()):
            rank.take_back(index, presumed)

    def _acknowledge(
        self, rank: PrefillRank, report: EndForward, lost_requests: int, launch_s: float
    ) -> Observation:
        named = [rank.flight.pop(rid) or self._passes.presumed(rid) for rid in report.rids]
        sent = [request.sent for request in named if request and request.sent]
        if report.kind in ("heartbeat", "idle"):
            rank.taken = [*rank.taken, *sent][-MOST_TAKEN:]
        elif report.kind == "launch":
            sent, rank.taken = [*rank.taken, *sent], []
        learned = Observation()
        if report.kind == "launch" and report.forward_id > self._ranks.ended_id:
            learned = observe_launch(self._passes, rank, sent, report, launch_s)
        # By the rank's counter, this many of the oldest were accepted as well.
        unnamed = self._passes.accept(report.rids, rank.requests, lost_requests)
        for request in rank.flight.oldest(unnamed):
            rank.flight.pop(request.rid)
        return learned

    def _vector(self, report: EndForward) -> list[int]:
        """Return the tokens of the reported pass per rank; 0 for other ranks if the report has only
        its own."""
        if report.tokens_per_rank is not None:
            return list(report.tokens_per_rank)
        mine = report.dp_rank
        return [report.extend_tokens if n == mine else 0 for n in range(len(self._ranks))]

    def _launched_s(self, report: EndForward, now_s: float) -> float:
        """Return the launch time of the reported pass. Under a barrier the first rank's report is
        the most accurate, because others may have been delayed."""
        start_s = now_s - report.age_s
        known = self._passes.with_id(report.forward_id)
        return start_s if known is None else min(start_s, known.start_s)

    def _learn_pause(self, report: EndForward, launch_s: float) -> None:
        """Learn the pause between the end of a pass and the next launch from a launch report. Skips
        reports of launches that not only the engine delayed: no pass has ended yet, the report is
        late, another reported pass runs, the time is negative or longer than the predicted pass, or
        a rank had nothing to launch since that end."""
        passes = self._passes
        if not passes.ended or report.forward_id <= self._ranks.ended_id or passes.reported:
            return
        pause_s = launch_s - passes.free_since_s
        longest_s = passes.model.predict_s(self._vector(report))
        if 0 <= pause_s <= longest_s and not passes.pause.rested_after(report.forward_id - 1):
            passes.pause.observe(pause_s)

    def _on_launch(self, report: EndForward, now_s: float) -> None:
        self._take_presumed_back()
        if report.forward_id <= self._ranks.ended_id:
            return  # another rank has reported the end, so this report is late
        for rank in self._ranks:
            # Under the barrier no rank is idle while a pass runs; its own next report may differ.
            rank.idle = False
        tokens, at, passes = self._vector(report), report.dp_rank, self._passes
        launched = passes.with_id(report.forward_id)
        if launched is None:
            start_s = max([now_s - report.age_s, *[running.end_s for running in passes[-1:]]])
            pairs = self._ranks.compute(tokens)
            launched = Pass(start_s, start_s, tokens, report.forward_id, pairs=pairs)
            passes.append(launched)
            del passes[:-MOST_PASSES]
        elif not launched.tokens[at]:
            launched.pairs[at] = self._ranks[at].compute(tokens[at])
        launched.tokens[at] = tokens[at]
        launched.end_s = launched.start_s + passes.model.predict_s(launched.tokens, launched.pairs)

    def _on_end(
        self, rank: PrefillRank, report: EndForward, now_s: float, learned: Observation
    ) -> None:
        end_s, newest = now_s - report.age_s, self._ranks.ended_id
        if report.forward_id != newest:
            self._forget_silent(end_s - report.forward_s - SILENT_S)
            newest = self._ranks.ended_id
        rank.last_forward_id = max(rank.last_forward_id, report.forward_id)
        self._take_presumed_back()
        if report.forward_id <= newest:
            return
        passes = self._passes
        ended = passes.with_id(report.forward_id)
        if ended is None:
            tokens = self._vector(report)
            pairs = self._ranks.compute(tokens)
        else:
            tokens, pairs = ended.tokens, ended.pairs
        later = [running for running in passes if (running.forward_id or 0) > report.forward_id]
        passes.end(later, end_s)
        learned.ended = True
        if not passes:
            passes.pause.begin(end_s)
        if sum(tokens) and report.forward_s > 0 and self._device.spend(report.forward_s):
            learned.forward_s = report.forward_s
            passes.ended += 1
            passes.model.observe(tokens, report.forward_s, pairs)

    def _presume_of_all(self, report: EndForward) -> None:
        """Presume that all ranks run a pass that one reports, because they share a barrier."""
        of_pass = report.kind in ("launch", "forward") and report.forward_id > self._presumed_id
        if of_pass and report.tokens_per_rank is not None:
            self._presumed_id = report.forward_id
            for rank, tokens in zip(self._ranks, report.tokens_per_rank, strict=True):
                rank.presume(report.forward_id, tokens, rank.chunk_tokens)


def within_limits(report: EndForward, most_tokens: int, dp_size: int) -> EndForward:
    """Clamp a report to what a pass can hold; ``most_tokens`` is the limit of one rank in one pass.
    A vector without ``dp_size`` entries is dropped."""
    extend_tokens = min(report.extend_tokens, most_tokens)
    passes, vector = min(report.inflight_passes, MOST_PASSES), report.tokens_per_rank
    if vector is not None and len(vector) != dp_size:
        vector = None
    if vector is not None:
        vector = [min(tokens, most_tokens) for tokens in vector]
    reported = report.extend_tokens, report.inflight_passes, report.tokens_per_rank
    if (extend_tokens, passes, vector) == reported:
        return report
    return msgspec.structs.replace(
        report, extend_tokens=extend_tokens, inflight_passes=passes, tokens_per_rank=vector
    )


class DeviceTime:
    """Rejects forward times of one instance that add up to more than the time it was observed, plus
    a limited credit for the time before."""

    def __init__(self, t_default_s: float) -> None:
        self._most_s = self._credit_s = _CREDIT * t_default_s
        self._last_report_s: float | None = None

    def on_report(self, now_s: float) -> None:
        """Add the time since the last report to the credit, as it may have been a single pass."""
        since_s = 0.0 if self._last_report_s is None else now_s - self._last_report_s
        self._credit_s = min(self._credit_s, self._most_s) + since_s
        self._last_report_s = now_s

    def spend(self, forward_s: float) -> bool:
        """Subtract a pass's duration from the credit. Returns False, with no change, if the credit
        is less: the forward time is implausible."""
        if forward_s > self._credit_s:
            return False
        self._credit_s -= forward_s
        return True
