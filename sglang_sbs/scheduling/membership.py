"""Keeps the prefill and decode instances, and which of them are up, down or drained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.events import InstanceDown, InstanceId, InstanceUp
from sglang_sbs.scheduling.lone_ranks import LoneRanks
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefill.moves import Stray
from sglang_sbs.scheduling.prefix_caches import PrefixCaches
from sglang_sbs.scheduling.request import Request
from sglang_sbs.wire import EndForward

_FORGET_DOWN_S = 600.0
"""Seconds after which an unreachable instance is dropped as removed. A decode instance with
outstanding requests is kept longer."""


class Membership:
    """The prefill and decode instances, and which are up or drained. A worker without a barrier is
    one instance per DP rank (:class:`LoneRanks`): only :meth:`up` and :meth:`down` take workers'
    names."""

    def __init__(self, config: SchedulerConfig, prefix: PrefixCaches) -> None:
        self._config = config
        self._prefix = prefix
        self.prefill: dict[InstanceId, PrefillInstance] = {}
        self.decode: dict[InstanceId, DecodeInstance] = {}
        self.lone = LoneRanks()
        """Names of the ranks of prefill workers without a barrier, which are instances here."""
        self.down_s: dict[InstanceId, float] = {}
        """Time when each instance went down or was drained, for those that are not up."""
        self.drained: set[InstanceId] = set()
        """Instances in ``down_s`` that are only drained: their engines still work."""
        self.up_prefill: list[PrefillInstance] = []
        self.up_decode: list[DecodeInstance] = []
        self.decode_targets: list[tuple[DecodeInstance, int]] = []
        """All ranks of the decode instances that are up, as (instance, rank)."""

    def up(self, event: InstanceUp) -> Iterator[InstanceId]:
        """Add or update a worker. Yields the id of each new instance once it is added."""
        instances, gone = self.lone.up(event)
        for name in gone:
            self._forget(name)
        for up in instances:
            is_new = up.instance not in self.prefill and up.instance not in self.decode
            self._up(up)
            if is_new:
                yield up.instance

    def down(self, event: InstanceDown, now_s: float) -> bool:
        """Record that a worker is unreachable or drained; return whether that changes which
        instances may get requests."""
        changes = False
        for name in self.lone.instances(event.instance):
            instance = self.prefill.get(name) or self.decode.get(name)
            if instance is None:
                return False
            was_lost = name in self.down_s and name not in self.drained
            if event.drained:
                self.drained.add(name)
            else:
                self.drained.discard(name)
                if not was_lost:
                    instance.down()
                    self._prefix.on_down(name)
            changes = changes or name not in self.down_s
            self.down_s.setdefault(name, now_s)
        return changes

    def refresh(self, now_s: float) -> list[PrefillInstance]:
        """Drop instances that were unreachable for long, and compute ``up_prefill``, ``up_decode``
        and ``decode_targets`` again. Return ``up_prefill``."""
        lost = [i for i in self.down_s if i not in self.drained]
        for gone in [i for i in lost if self.down_s[i] + _FORGET_DOWN_S <= now_s]:
            # Probably removed for good; otherwise the records would grow with churn.
            decode = self.decode.get(gone)
            if decode is None or not decode.has_outstanding:
                self._forget(gone)
                self.lone.forget(gone)
        self.up_prefill = [i for i in self.prefill.values() if i.id not in self.down_s]
        self.up_decode = [d for d in self.decode.values() if d.id not in self.down_s]
        self.decode_targets = [(d, rank) for d in self.up_decode for rank in range(d.dp_size)]
        pass_tokens = sum(instance.capacity_tokens for instance in self.up_prefill)
        for decode in self.up_decode:
            decode.may_park(pass_tokens // len(self.decode_targets))
        return self.up_prefill

    def _up(self, event: InstanceUp) -> None:
        name, is_prefill = event.instance, event.role == "prefill"
        relaunched = name in self.down_s and name not in self.drained
        self.down_s.pop(name, None)
        self.drained.discard(name)
        (self.decode if is_prefill else self.prefill).pop(name, None)
        known = self.prefill.get(name) or self.decode.get(name)
        if known is not None and known.dp_size == event.dp_size:
            known.set_limits(event)
        elif known is not None and not relaunched:
            known.resize(event)
        elif is_prefill:
            self.prefill[name] = PrefillInstance(
                event,
                t_default_s=self._config.t_default_s,
                default_chunk_tokens=self._config.default_chunk_tokens,
                worker=self.lone.outside(name, 0, event.dp_size).worker,
            )
        else:
            self.decode[name] = DecodeInstance(event)
        self._prefix.on_up(event)

    def _forget(self, name: InstanceId) -> None:
        self.down_s.pop(name, None)
        self.drained.discard(name)
        self.decode.pop(name, None)
        self.prefill.pop(name, None)
        self._prefix.forget(name)

    def strays(
        self, report: EndForward, prefill: PrefillInstance, requests: Mapping[str, Request]
    ) -> list[Stray]:
        """Return the requests that a rank of ``prefill`` reports as accepted, although they were
        dispatched to another rank of the same worker."""
        here = prefill.id, report.dp_rank
        strays = []
        for rid in report.rids if 0 <= report.dp_rank < prefill.dp_size else ():
            request = requests.get(rid)
            if request is None or request.prefilled or request.prefill in (None, here):
                continue
            name, rank = request.prefill
            source = self.prefill.get(name)
            if source is None or source.worker != prefill.worker or rank >= source.dp_size:
                continue
            cached_tokens = request.hit_tokens(*here)
            strays.append(Stray(rid, source, rank, request.prompt_tokens, cached_tokens))
        return strays
