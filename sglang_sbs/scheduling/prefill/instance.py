"""The estimated state of one prefill instance, and how reports correct it.

How the estimate stays correct ------------------------------ A dispatched request is *in flight*
until the rank reports that it accepted it (``rids``). Then it is part of the rank's reported queue
(absolute numbers, never summed here), and with a launch it leaves both and is part of a
:class:`Pass`. EndForward ends the pass. So every report replaces assumptions by facts, and a lost
one is healed by the next. Until then, another rank's report of the same pass applies to this one as
well. Latency and lead are learned only from a rank's own reports.

Without reports (no plugin, or the instance became silent) the same state is kept by assumption. A
backlog is *presumed* launched after the usual latency, first come first served up to the chunk, and
the pass is presumed over when one of its requests is answered. A later report overrides that."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_sbs.scheduling.prefill.books import PrefillBooks
from sglang_sbs.scheduling.prefill.moves import Stray
from sglang_sbs.scheduling.prefill.observation import Observation, observe_launch
from sglang_sbs.scheduling.prefill.passes import Pass, Sent, accepted, sent_of, with_id
from sglang_sbs.scheduling.prefill.rank import MOST_TAKEN, PrefillRank
from sglang_sbs.scheduling.prefill.report_limits import MOST_CHUNKS, MOST_PASSES, within_limits
from sglang_sbs.scheduling.report_cursor import SILENT_S
from sglang_sbs.wire import EndForward

_CACHED_STEP = 0.05
"""Weight of one prompt in ``cached_share``."""
HEARTBEATS_S = 2.5
"""Silence after which an instance that sends reports counts as silent: two missed heartbeats."""
UNANSWERED_S = 30.0
"""Age from which an unanswered request of a silent instance no longer blocks others."""
LOST_S = 2.0
"""Age at which a request not named by a reporting rank no longer counts, at least the watchdog's
timeout: its connection hangs, or the engine dropped it."""


class PrefillInstance(PrefillBooks):
    """State of one prefill instance, corrected by its reports and by their absence."""

    # Time ---------------------------------------------------------------------------------

    def advance(self, now_s: float, latency_s: float) -> float:
        """Apply presumed launches and ends, and the watchdog, up to ``now_s``. Returns the time of
        the next call even without reports; infinity for never."""
        if self.watchdog.due_s <= now_s:
            self._on_silence(now_s)
        if self.rests:
            return self.watchdog.due_s
        if self.pause.until_s <= now_s and self.pause.on:
            self._changes()
            self.pause.end()
        if self.tier != "endforward":
            while self.passes and not self.passes[0].rids and self.passes[0].end_s <= now_s:
                # No request finishes in this pass (chunks only), so no answer will end it.
                self._changes()
                self.free_since_s = self.passes.pop(0).end_s
                self.ready = True
        launch_s = self._presumed_launch_s(latency_s)
        if launch_s <= now_s:
            sends = self.has_flight
            self._presume_launch(now_s, launch_s)
            self._recount()
            if sends:
                # Assumptions are not reports, so others' queued work does not delay the watchdog.
                self._watch(now_s)
            launch_s = math.inf
        next_s = min(self.watchdog.due_s, launch_s)
        if self.pause.on:
            next_s = min(next_s, self.pause.until_s)
        if self.tier != "endforward" and self.passes and not self.passes[0].rids:
            next_s = min(next_s, self.passes[0].end_s)
        return next_s

    # Own actions --------------------------------------------------------------------------

    def dispatched(
        self,
        rid: str,
        rank: int,
        prompt_tokens: int,
        now_s: float,
        cached_tokens: int = 0,
        serial_s: float = 0.0,
        *,
        fetches: bool = False,
    ) -> None:
        """Record a dispatch to a rank, and arm the watchdog if it is not armed. ``serial_s``: delay
        that it adds to later requests of its batch. ``fetches``: the rank loads part of it from
        storage first, so its launch gives no latency sample."""
        if self._batch is None or self._batch.at_s != now_s:
            # A batch may hang on its way, so it is not followed for long.
            last_s = self._batch.at_s if self._batch is not None else -math.inf
            joins = self.has_flight and last_s > self.free_since_s
            self._batch = Sent(now_s, self.idle, joins, 0)
        self._batch.requests += 1
        self.left_s = self._batch.left_s = max(now_s, self.left_s) + serial_s
        self.ranks[rank].sent[rid] = Sent(now_s, joins=True) if fetches else self._batch
        self.has_flight = True
        self.adopted(rid, rank, prompt_tokens, now_s, cached_tokens)

    def adopted(
        self, rid: str, rank: int, prompt_tokens: int, now_s: float, cached_tokens: int = 0
    ) -> None:
        """Record a request dispatched by another scheduler; it gives no latency sample."""
        self._forget_sums(rank)
        is_first = not self.has_outstanding
        target = self.ranks[rank]
        flight, requests = target.flight, len(target.outstanding)
        self.backlog_tokens -= flight.total
        self.charged_tokens -= flight.charged
        tokens = max(1, prompt_tokens - cached_tokens)
        flight.add(rid, tokens)
        target.outstanding.add(rid, tokens)
        target.prompts.add(rid, prompt_tokens, prompt_tokens - tokens)
        target.has_cached = target.has_cached or cached_tokens > 0
        share = min(1.0, cached_tokens / max(1, prompt_tokens))
        self.cached_share += _CACHED_STEP * (share - self.cached_share)
        target.received_tokens += tokens
        self.backlog_tokens += flight.total
        self.charged_tokens += flight.charged
        self._outstanding += len(target.outstanding) - requests
        if is_first:
            self._watch(now_s)
        self.last_dispatch_s = now_s
        self.ready = False

    def prefilled(self, rid: str, rank: int, now_s: float) -> Observation:
        """Record the engine's answer for this request (or its end): it uses no prefill capacity
        now. Without EndForward this also indicates the end of the pass it was presumed in."""
        ended = next((i for i, running in enumerate(self.passes) if rid in running.rids), None)
        self.dropped(rid, rank)
        self._answered()
        if self.tier == "endforward":
            return Observation()
        if self.has_outstanding:
            self._watch(now_s)
        if ended is None:
            return Observation()
        if self.tier != "load_poll":
            self.tier = "http"
        del self.passes[:ended]
        return self._end_presumed(now_s)

    def dropped(self, rid: str, rank: int) -> None:
        """Remove a request from the rank without any conclusion about a pass."""
        if rank >= self.dp_size:
            return  # it was sent to a former instance of another size
        target = self.ranks[rank]
        backlog, charged = target.backlog_tokens, target.charged_tokens
        requests = len(target.outstanding)
        if target.gone(rid):
            self._forget_sums(rank)
            self.backlog_tokens += target.backlog_tokens - backlog
            self.charged_tokens += target.charged_tokens - charged
            self._outstanding += len(target.outstanding) - requests
            self.has_flight = any(one.sent for one in self.ranks)
        self.moves.ended(rid)
        for running in self.passes:
            # No answer will end the pass for this request; without any it ends by time.
            running.rids.pop(rid, None)
        self._changes()
        if not self.has_outstanding:
            self._answered()
        if not self._owes_signal:
            self.watchdog.due_s = math.inf
        if not self.has_outstanding and self.tier != "endforward" and not self.passes:
            self.ready = True

    # Reports ------------------------------------------------------------------------------

    def on_report(
        self, report: EndForward, now_s: float, latency_s: float, strays: Sequence[Stray] = ()
    ) -> Observation:
        """Replace assumptions by a rank's report. Old and duplicate messages change nothing.
        ``latency_s``: L_net, which shows what was at the rank when the previous pass ended.
        ``strays``: requests named by the rank and assumed elsewhere."""
        if not 0 <= report.dp_rank < self.dp_size:
            return Observation()
        rank = self.ranks[report.dp_rank]
        taken = rank.cursor.take(report, now_s)
        if taken is None:
            return Observation()
        if taken.restarted:
            self._on_restart(rank)
        self._device.heard(now_s)
        report = self._plausible(rank, report)
        rank.clean = False
        rank.unanswered = False
        rank.stalled.observe(report, now_s)
        self.tier = "endforward"
        inflight = 0 if report.kind == "launch" else report.inflight_passes
        rank.heard(report.forward_id + inflight)
        rests = report.kind in ("idle", "heartbeat")
        if rests and report.idle and all(one.idle for one in self.ranks if one is not rank):
            self._drop_presumed()  # what the rank does not name has not come yet
        launch_s = self._launched_s(report, now_s)
        if report.kind == "launch":
            self._learn_pause(report, launch_s)
            self.pause.end()
        moved = self.moves.follow(self.ranks, report.dp_rank, strays) if strays else []
        lost = self.moves.settle(report, taken.lost_requests)
        learned = self._acknowledge(rank, report, lost, launch_s)
        learned.restarted, learned.moved = taken.restarted, moved
        rank.give_up(now_s - max(LOST_S, self.watchdog.timeout_s))
        rank.on_queue(report, self.chunk_tokens)
        rank.idle = report.idle
        for running in self.passes:
            if running.forward_id is None:
                running.queued[report.dp_rank] = 0
        if report.kind == "launch":
            self._on_launch(report, now_s)
        elif report.kind == "forward":
            rank.left_waiting = report.waiting_requests + report.chunk_remainder_tokens > 0
            learned.forward_s = self._on_end(rank, report, now_s)
        rank.presume_again(self.chunk_tokens)
        if report.kind in ("launch", "forward") and report.forward_id > self._presumed_id:
            self._presume_of_all(report)
        if rests and not inflight:
            self.pause.rests(report.forward_id)
        if rests and all(running.forward_id is None for running in self.passes):
            self._forget_silent(now_s - SILENT_S)
        self._recount()
        if rests and all(r.idle for r in self.ranks):
            self._on_quiescent(now_s)
        self._watch(now_s)
        return learned

    def on_load_poll(self, queued_tokens: list[int], now_s: float) -> None:
        """Apply a load poll, the coarse fallback: queued tokens beyond those sent from here."""
        if self.tier == "endforward" or len(queued_tokens) != self.dp_size:
            return
        self.tier = "load_poll"
        for rank, tokens in zip(self.ranks, queued_tokens, strict=True):
            if tokens < 0:
                continue
            # The poll may or may not count requests sent a moment ago.
            queued = max(0, tokens - rank.flight.total)
            rank.queued_tokens = min(queued, MOST_CHUNKS * self.chunk_tokens)
        self._recount()
        if max(queued_tokens) > 0:
            self._watch(now_s)
            if not self.passes:
                # A queue means that an unreported pass runs until now at least.
                self.free_since_s = now_s
        if not any(queued_tokens) and not self.has_outstanding:
            self._on_quiescent(now_s)

    def reset(self) -> None:
        """Forget all requests and passes assumed here."""
        for rank in self.ranks:
            rank.forget()
        self.moves.clear()
        self._recount()
        self.passes.clear()
        self.watchdog.due_s = math.inf
        self.ready = True
        self.pause.end()
        self.left_s = -math.inf

    def down(self) -> None:
        """The instance is unreachable: nothing sent there counts any longer."""
        self.reset()
        for rank in self.ranks:
            rank.clean = True
            rank.prompts.clear()

    # Inside -------------------------------------------------------------------------------

    @property
    def _owes_signal(self) -> bool:
        """Whether a report is expected: an answer, the end of a pass, or idleness. This holds even
        without own requests, because it may have become silent after its last report."""
        return bool(self.has_outstanding or self.passes or self.backlog_tokens or not self.ready)

    def _watch(self, now_s: float) -> None:
        """Restart the watchdog after a report or a new assumption."""
        if not self._owes_signal:
            self.watchdog.due_s = math.inf
        elif not self.passes:
            # A rank without passes sends a heartbeat once a second.
            wait_s = LOST_S if not self.has_outstanding else 0.0
            if self.tier == "endforward":
                wait_s = max(wait_s, HEARTBEATS_S - self.watchdog.timeout_s)
            self.watchdog.arm(now_s, busy_until_s=now_s + wait_s, launched=False)
        else:
            first = self.passes[0]
            launched = first.forward_id is not None
            self.watchdog.arm(now_s, busy_until_s=first.end_s, launched=launched)

    def _on_restart(self, rank: PrefillRank) -> None:
        """Handle another boot id: forward ids start anew, and the rank's requests are lost."""
        if not rank.clean:
            rank.forget()
            rank.prompts.clear()
        self.cached_share = 0.0
        self.moves.clear()
        self._forget_ids()

    def _forget_ids(self) -> None:
        """Forget passes, because forward ids start anew."""
        self.passes.clear()
        self._presumed_id = -1
        self.pause.forget_ids()
        for rank in self.ranks:
            rank.new_boot()

    def _plausible(self, rank: PrefillRank, report: EndForward) -> EndForward:
        """Clamp a report to possible values. Earlier reports may have been forged as well."""
        if rank.contradicts(report):
            self._forget_ids()
        most = 2 * self.chunk_tokens
        if report.extend_tokens > most or max(report.tokens_per_rank or [0]) > most:
            # Without chunking a rank computes whole prompts.
            most = max(most, self.longest_prompt_tokens)
        return within_limits(report, most, self.dp_size)

    def _forget_silent(self, before_s: float) -> None:
        """Discard reports of ranks that are silent while others report."""
        silent = [rank for rank in self.ranks if (rank.cursor.reported_s or before_s) < before_s]
        if silent:
            newest = max([rank.newest_id for rank in self.ranks if rank not in silent], default=-1)
            if max([rank.newest_id for rank in silent]) > newest:
                self._forget_ids()  # otherwise others would be ahead of it
            for rank in silent:
                rank.fell_silent()

    def _on_silence(self, now_s: float) -> None:
        """Reset predictions after T_timeout of silence (paper section 4.1.2). Unanswered requests
        stay, and nothing is sent until one is answered, a report arrives, or they may be lost."""
        self.watchdog.fires += 1
        lost_s = self.last_dispatch_s + UNANSWERED_S
        open_requests = [
            {rid: rank.outstanding[rid] for rid in rank.outstanding.oldest()}
            for rank in self.ranks
            if now_s < lost_s
        ]
        self.reset()
        self.tier = "interval"
        self.free_since_s = now_s
        if any(open_requests):
            for rank, requests in zip(self.ranks, open_requests, strict=True):
                rank.outstanding.add_oldest(requests)
                rank.flight.add_oldest(requests)
                rank.unanswered = True
            self._recount()
            self.ready = False
            self.watchdog.due_s = lost_s

    def _answered(self) -> None:
        """The instance works, so its unanswered requests are in progress."""
        for rank in self.ranks:
            if rank.unanswered:
                rank.unanswered = False
                self._forget_sums()

    def _presume_of_all(self, report: EndForward) -> None:
        """Apply one rank's report of a pass to all ranks that share the barrier."""
        if report.tokens_per_rank is not None:
            self._presumed_id = report.forward_id
            for rank, tokens in zip(self.ranks, report.tokens_per_rank, strict=True):
                rank.presume(report.forward_id, tokens, self.chunk_tokens)

    def _presumed_launch_s(self, latency_s: float) -> float:
        if not self.launching or self.takes_nothing:
            return math.inf
        start_s = self.launches_s(latency_s)
        # With a plugin, wait a little for the launch report before presuming it lost.
        grace_s = 0.5 * self.model.predict_s([0]) if self.tier == "endforward" else 0.0
        return start_s + grace_s

    def _presume_launch(self, now_s: float, start_s: float) -> None:
        """Presume that the backlog was launched: first come, first served per rank, up to the
        chunk."""
        tokens = []
        rids: dict[str, tuple[int, Sent]] = {}
        queued = []
        for index, rank in enumerate(self.ranks):
            of_queue, of_flight, landed = rank.take_chunk(self.chunk_tokens)
            queued.append(of_queue)
            tokens.append(of_queue + of_flight)
            for rid, sent in landed.items():
                rids[rid] = index, sent or Sent(self.last_dispatch_s, joins=True)
        pairs = self._pairs(tokens)
        end_s = max(now_s, start_s + self.model.predict_s(tokens, pairs))
        self.passes.append(Pass(start_s, end_s, tokens, None, rids, queued, pairs))

    def _acknowledge(
        self, rank: PrefillRank, report: EndForward, lost_requests: int, launch_s: float
    ) -> Observation:
        named = [rank.land(rid) or sent_of(rid, self.passes) for rid in report.rids]
        sent = [one for one in named if one is not None]
        if report.kind in ("heartbeat", "idle"):
            rank.taken = [*rank.taken, *sent][-MOST_TAKEN:]
        elif report.kind == "launch":
            sent, rank.taken = [*rank.taken, *sent], []
        learned = Observation()
        if report.kind == "launch" and not self._is_over(report.forward_id):
            learned = observe_launch(self, rank, sent, report, launch_s)
        # By the rank's counter, this many of the oldest were accepted as well.
        unnamed = accepted(self.passes, report.rids, report.dp_rank, lost_requests)
        for rid in rank.flight.oldest(unnamed):
            rank.land(rid)
        return learned

    def _launched_s(self, report: EndForward, now_s: float) -> float:
        """Return the launch time of the reported pass. Under a barrier the first rank's report is
        the most accurate, because others may have been delayed."""
        heard_s = now_s - report.age_s
        known = with_id(self.passes, report.forward_id)
        return heard_s if known is None else min(heard_s, known.start_s)

    def _learn_pause(self, report: EndForward, launch_s: float) -> None:
        """Learn from a launch that only the engine itself delayed."""
        if not self.passes_ended or self._is_over(report.forward_id):
            return
        if any(running.forward_id is not None for running in self.passes):
            return
        pause_s = launch_s - self.free_since_s
        longest_s = self.model.predict_s(self._vector(report))
        if 0 <= pause_s <= longest_s and not self.pause.rested_after(report.forward_id - 1):
            self.pause.observe(pause_s)

    def _on_launch(self, report: EndForward, now_s: float) -> None:
        self._drop_presumed()
        if self._is_over(report.forward_id):
            return
        for rank in self.ranks:
            # Under the barrier no rank is idle while a pass runs; its own next report may differ.
            rank.idle = False
        tokens = self._vector(report)
        known = with_id(self.passes, report.forward_id)
        if known is not None:
            if not known.tokens[report.dp_rank]:
                mine = self.ranks[report.dp_rank].prompts.compute(tokens[report.dp_rank])
                known.pairs[report.dp_rank] = mine
            known.tokens[report.dp_rank] = tokens[report.dp_rank]
            known.end_s = known.start_s + self.model.predict_s(known.tokens, known.pairs)
            return
        start_s = now_s - report.age_s
        if self.passes:
            start_s = max(start_s, self.passes[-1].end_s)
        pairs = self._compute(tokens)
        end_s = start_s + self.model.predict_s(tokens, pairs)
        self.passes.append(Pass(start_s, end_s, tokens, report.forward_id, pairs=pairs))
        del self.passes[:-MOST_PASSES]

    def _on_end(self, rank: PrefillRank, report: EndForward, now_s: float) -> float | None:
        newest = max(r.last_forward_id for r in self.ranks)
        if report.forward_id != newest:
            self._forget_silent(now_s - report.age_s - report.forward_s - SILENT_S)
            newest = max(r.last_forward_id for r in self.ranks)
        rank.last_forward_id = max(rank.last_forward_id, report.forward_id)
        self._drop_presumed()
        if report.forward_id <= newest:
            return None
        ended = with_id(self.passes, report.forward_id)
        if ended is None:
            tokens = self._vector(report)
            pairs = self._compute(tokens)
        else:
            tokens, pairs = ended.tokens, ended.pairs
        self.passes = [p for p in self.passes if (p.forward_id or 0) > report.forward_id]
        end_s = now_s - report.age_s
        self.ready = True
        self.free_since_s = end_s
        if not self.passes:
            self.pause.begin(end_s)
        self._rechain(end_s)
        if sum(tokens) == 0 or report.forward_s <= 0 or not self._device.spend(report.forward_s):
            return None
        self.passes_ended += 1
        self.model.observe(tokens, report.forward_s, pairs)
        self.watchdog.on_pass(report.forward_s)
        return report.forward_s

    def _end_presumed(self, now_s: float) -> Observation:
        self._forget_sums()
        ended = self.passes.pop(0)
        forward_s = max(1e-3, now_s - ended.start_s)
        self.ready = True
        self.free_since_s = now_s
        self._rechain(now_s)
        self.passes_ended += 1
        self.model.observe(ended.tokens, forward_s, self._compute(ended.tokens))
        self.watchdog.on_pass(forward_s)
        return Observation(forward_s=forward_s)

    def _on_quiescent(self, now_s: float) -> None:
        self.passes.clear()
        self.free_since_s = min(self.free_since_s, now_s)
        # Requests sent a moment ago are not visible yet, so the instance is not free for another
        # batch.
        if self.backlog_tokens == 0:
            self.ready = True


Instances = Sequence[PrefillInstance]
