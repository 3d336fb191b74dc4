"""What a prompt costs of the chunk: an engine charges each request whole pages.

Capacity (C_avail, what fits into a pass) is counted in charged tokens; forward times, reports and
the fair share are in true ones. A prompt is only ever cut between two pages, so whatever part of it
is left costs as many tokens more than it has as the whole of it did.

Source: ``schedule_policy.py`` of SGLang, ``_update_prefill_budget``.
"""

from __future__ import annotations


def paged(tokens: int, page: int) -> int:
    """Tokens of the chunk that a request with so many to compute is charged."""
    return tokens if page == 1 else -(-tokens // page) * page


def whole_pages(chunk_tokens: int, page: int) -> int:
    """What of a chunk can be used; at least a page."""
    return max(page, chunk_tokens // page * page)
