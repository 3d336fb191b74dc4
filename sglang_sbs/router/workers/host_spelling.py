"""How decode instances are told the host of a prefill instance.

Decode keeps a prefill instance's ports under the host as it is written (SGLang,
``disaggregation/common/conn.py``: ``prefill_info_table``, ``connection_pool``), and misses a quick
restart; written otherwise it is asked anew. When engines say they started decides, where they say
it, so that every router comes to the same spelling."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, ip_address
from zlib import crc32

from sglang_sbs.router.workers.server_info import SbsBlock

OLDER_S = 5
"""A decode instance that started so long before a prefill instance may have spoken to the process
that was there before: it takes longer to start."""
_SPELLINGS = 1 << 16
_TRIES = 16
_MAX_REMEMBERED = 256


# SGLang fault: stale-prefill-ports
def spelling_for(
    host: str,
    prefill: SbsBlock,
    decode: Sequence[SbsBlock | None],
    called: dict[str, str],
    now: int = 0,
) -> int:
    """Which spelling of its host goes with that boot, beside these decode instances; 0: as it is.

    ``None``: a decode instance that says nothing of its boot; beside it the host is as it is until
    this router sees another boot there. ``called``: the boots it saw there, by spelling; the new
    one is noted. (Short names can be spelled in few ways.) ``now``: how it is spelled, which stays
    where somebody does not say: the process before this one may have seen more.
    """
    restarted = any(boot != prefill.boot_id for boot in called.values())
    if not any(_may_be_older(one, prefill, restarted) for one in decode):
        told = prefill.booted_s and all(one is not None and one.booted_s for one in decode)
        kept = 0 if told else now
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
    """Another way to write the same host, each ``spelling`` its own; 0: as it is. IPv4: hex with
    leading zeros (``inet_aton(3)``); IPv6: in full, some groups with leading zeros; a name: some
    letters in upper case. With n short groups or letters there are 2^n - 1 ways; then they come
    again."""
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
    """Some of them: never none, if there is one."""
    bits = 1 + (spelling - 1) % max(1, (1 << len(places)) - 1)
    return {at for bit, at in enumerate(places) if bits >> bit & 1}
