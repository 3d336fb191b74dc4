"""Chooses how a prefill instance's host is spelled for decode instances.

Decode caches a prefill instance's ports under the spelling of its host (SGLang,
``disaggregation/common/conn.py``: ``prefill_info_table``, ``connection_pool``). After a quick
restart it would use the old ports; a new spelling makes it ask again. The choice depends on the
start times that engines report, so that all routers agree on the spelling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, ip_address
from typing import Protocol
from zlib import crc32

from sglang_sbs.router.engines.urls import bracketed, split_worker_url
from sglang_sbs.router.workers.server_info import SbsBlock, WorkerInfo

OLDER_S = 5
"""Seconds by which a decode instance must be older than a prefill process before it can have
contacted the former process at that URL. Decode takes longer than this to start."""
_SPELLINGS = 1 << 16
_TRIES = 16
_MAX_REMEMBERED = 256


class Spelled(Protocol):
    """Attributes of a :class:`~.worker.Worker` that choosing the spelling of its host needs."""

    url: str
    info: WorkerInfo | None
    spelled: int
    """Number of the spelling of its host that engines get; 0: as given."""
    called: dict[str, str]
    """Boot id that this router has seen under each spelling of its host."""


# SGLang fault: stale-prefill-ports
def host_for_decode(url: str, spelled: int) -> str:
    """Return the host of a prefill worker's ``url`` as decode gets it, with spelling number
    ``spelled``; IPv6 in brackets."""
    return bracketed(respelled(split_worker_url(url)[1], spelled))


def respell_all(prefill: Iterable[Spelled], decode: Iterable[Spelled]) -> None:
    """Set each prefill worker's ``spelled`` so that decode contacts no former process there."""
    blocks = [engine.info.sbs for engine in decode if engine.info is not None]
    for worker in prefill:
        sbs = worker.info.sbs if worker.info is not None else None
        if sbs is not None and sbs.boot_id:
            host = split_worker_url(worker.url)[1]
            worker.spelled = spelling_for(host, sbs, blocks, worker.called, worker.spelled)


def spelling_for(
    host: str,
    prefill: SbsBlock,
    decode: Sequence[SbsBlock | None],
    called: dict[str, str],
    now: int = 0,
) -> int:
    """Return the number of the host's spelling for boot ``prefill`` and these decode instances; 0:
    as given.

    A ``None`` in ``decode`` is an instance that does not report its boot; the host then stays
    unchanged until this router sees another boot there. ``called``: boots seen there by spelling,
    to which the new one is added. (Short names have few spellings.) ``now``: current spelling, kept
    if some boot is unknown, because an earlier router process may have seen more."""
    restarted = any(boot != prefill.boot_id for boot in called.values())
    if not any(_may_be_older(engine, prefill, restarted) for engine in decode):
        known = prefill.booted_s and all(
            engine is not None and engine.booted_s for engine in decode
        )
        kept = 0 if known else now
        boot_id = called.setdefault(respelled(host, kept), prefill.boot_id)
        return kept if boot_id == prefill.boot_id else 0
    if len(called) >= _MAX_REMEMBERED:
        called.clear()
    first = 1 + crc32(prefill.boot_id.encode()) % _SPELLINGS
    for spelling in range(first, first + _TRIES):
        if called.setdefault(respelled(host, spelling), prefill.boot_id) == prefill.boot_id:
            return spelling
    return first


def _may_be_older(decode: SbsBlock | None, prefill: SbsBlock, restarted: bool) -> bool:
    if decode is None or not decode.booted_s or not prefill.booted_s:
        return restarted
    return decode.booted_s + OLDER_S <= prefill.booted_s


def respelled(host: str, spelling: int) -> str:
    """Return another spelling of the same host for each ``spelling``; 0 is unchanged. IPv4 is
    written in hex with leading zeros (``inet_aton(3)``), IPv6 in full with leading zeros in some
    groups, a name with some capital letters. With n short groups or letters there are 2^n - 1
    spellings, which then repeat."""
    if not spelling:
        return host
    try:
        address = ip_address(host)
    except ValueError:
        letters = [at for at, char in enumerate(host) if char.isascii() and char.isalpha()]
        chosen = _chosen(letters, spelling)
        return "".join(char.upper() if at in chosen else char for at, char in enumerate(host))
    if isinstance(address, IPv4Address):
        zeros = [(spelling - 1) >> 4 * at & 15 for at in range(4)]
        return ".".join(
            f"0x{'0' * count}{int(number):x}" if count or not at else number
            for at, (number, count) in enumerate(zip(host.split("."), zeros, strict=True))
        )
    groups = [f"{int(group, 16):x}" for group in address.exploded.split(":")]
    chosen = _chosen([at for at, group in enumerate(groups) if len(group) < 4], spelling)
    return ":".join(f"{g:0>4}" if at in chosen else g for at, g in enumerate(groups))


def _chosen(places: list[int], spelling: int) -> set[int]:
    """Return a subset of the places, not empty if possible; spellings differ until they repeat."""
    bits = 1 + (spelling - 1) % max(1, (1 << len(places)) - 1)
    return {at for bit, at in enumerate(places) if bits >> bit & 1}
