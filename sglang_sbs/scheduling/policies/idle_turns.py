"""Chooses which of several idle instances gets the next request. Must not know what is cached
there.

Equal instances never have exactly equal predictions, because each forward model is fitted to its
instance's own passes, and does not change while the instance gets no requests. Without turns, all
requests of a quiet cluster would go to one instance: the first, or the one with the most optimistic
prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import PrefillInstance


def pass_with_s(instance: PrefillInstance, tokens: int) -> float:
    """Return the predicted seconds of the instance's next pass if its backlog and a request of this
    many uncached tokens were spread evenly over its DP ranks."""
    # Evenly, though the request is on one rank: with the length that its rank gives the pass,
    # tokens behind a fuller rank cost nothing, and ``eta`` fills one instance after the other.
    formula, all_tokens = instance.model.formula, instance.ranks.backlog_tokens + tokens
    return formula.spread_s(all_tokens, instance.dp_size, instance.chunk_tokens)


def whose_turn(idle: Sequence[PrefillInstance], tokens: int, session: str = "") -> PrefillInstance:
    """Return the idle instance whose last dispatch is longest ago, among those predicted to finish
    a request of ``tokens`` uncached tokens as early as the best one, within the error of their
    models. With a ``session`` (conversation) the choice is by hash, the same each time."""
    passes = [-(-tokens // instance.chunk_tokens) for instance in idle]
    finish_s = [n * pass_with_s(instance, tokens) for n, instance in zip(passes, idle, strict=True)]
    best = min(range(len(idle)), key=finish_s.__getitem__)
    error_s = idle[best].model.error_s

    def is_equal(number: int) -> bool:
        model = idle[number].model
        if passes[number] > passes[best]:
            return False
        unsure_s = max(error_s, model.error_s)
        return (
            model.passes < TUNING.few_passes
            or TUNING.worth * finish_s[number] <= finish_s[best] + unsure_s
        )

    equal = [instance for number, instance in enumerate(idle) if is_equal(number)]
    if session:
        return min(equal, key=lambda instance: crc32(f"{session} {instance.id}".encode()))
    return min(equal, key=lambda instance: instance.last_dispatch_s)
