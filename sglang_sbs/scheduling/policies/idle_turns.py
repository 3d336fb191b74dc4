"""Chooses which of several idle instances gets the next request. Must not know what is cached
there.

Equal instances never have exactly equal predictions, because each one's are fitted to its own
passes. An instance without requests gets no passes, so its prediction stays as it is. Without turns
all requests of a quiet cluster would go to one instance: the first one, or the one with the most
optimistic prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import PrefillInstance


def pass_with_s(instance: PrefillInstance, tokens: int) -> float:
    """Predicted length of the next pass with a request of this many uncached tokens, spread evenly
    over the DP ranks, seconds."""
    # Evenly, though the request is on one rank: with the length that its rank gives the pass,
    # tokens behind a fuller rank cost nothing, and ``eta`` fills one instance after the other.
    formula, all_tokens = instance.model.formula, instance.ranks.backlog_tokens + tokens
    return formula.spread_s(all_tokens, instance.dp_size, instance.chunk_tokens)


def whose_turn(idle: Sequence[PrefillInstance], tokens: int, session: str = "") -> PrefillInstance:
    """Return the idle instance with the oldest last dispatch. Only instances predicted to finish
    the request as early as the best one, within the error of their models, take part. A
    conversation (``session``) gets the same instance each time. ``tokens``: uncached tokens of the
    request."""
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
