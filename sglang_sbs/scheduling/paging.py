"""Units in which an engine counts: whole pages of the chunk, and the sizes of captured graphs.

Capacity (C_avail, room in a pass) is counted in charged tokens, which are whole pages; reports and
forward times are counted in true tokens. A prompt is only cut between pages, so its last part is
charged as many extra tokens as the whole prompt.

Source: ``schedule_policy.py`` of SGLang, ``_update_prefill_budget``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_MOST_PADDING = 2
"""Largest padding, as a multiple of a rank's tokens; beyond it a pass runs without a graph."""


def paged(tokens: int, page: int) -> int:
    """Return the tokens of the chunk that a request is charged: rounded up to whole pages."""
    return tokens if page == 1 else -(-tokens // page) * page


def whole_pages(chunk_tokens: int, page: int) -> int:
    """Return the usable tokens of a chunk: as many whole pages as fit, at least one."""
    return max(page, chunk_tokens // page * page)


def padded(tokens_per_rank: Sequence[int], captured: Sequence[int]) -> Sequence[int]:
    """Return the tokens that the ranks compute in a pass, with CUDA graphs captured for these token
    counts.

    A graph is replayed if the fullest rank fits the largest graph and no rank with tokens would be
    padded by more than ``_MOST_PADDING`` on its own. All ranks then compute the tokens of the
    smallest graph that fits the fullest rank, and an idle rank computes a dummy request. So the
    cost of a pass rises in steps. Source: ``dp_attn.py`` (``_local_prefill_cuda_graph_vote``),
    ``forward_batch_info.py`` (``prepare_mlp_sync_batch``) and ``prefill_cuda_graph_runner.py``
    (``can_replay_locally``) of SGLang.

    Args:
        tokens_per_rank: extend tokens.
        captured: ascending; empty for an engine without prefill graphs."""
    fullest = max(tokens_per_rank)
    if not captured or not 0 < fullest <= captured[-1]:
        return tokens_per_rank
    for tokens in tokens_per_rank:
        if tokens and captured[bisect_left(captured, tokens)] > _MOST_PADDING * tokens:
            return tokens_per_rank
    return [captured[bisect_left(captured, fullest)]] * len(tokens_per_rank)
