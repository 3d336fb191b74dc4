"""Reads the number of DP ranks of an engine from its flags, as SGLang of any release does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

OLD_FLAG = "--enable-dp-attention"
"""The flag that makes DP ranks share a TP group. Up to SGLang 0.5.21 ``--dp-size N
--enable-dp-attention`` is the only spelling. SGLang 0.5.22 adds ``--attn-dp-size N``, and announces
to remove the old spelling after 2026-12-31."""


class EngineFlagError(ValueError):
    """A flag has a value that SGLang would refuse."""


@dataclass(frozen=True)
class DpRanks:
    """The DP ranks of one engine: their `count`, and whether they share GPUs (`attention`) or are
    replicas."""

    count: int
    attention: bool
    """True: the ranks share one TP group and its GPUs (DP attention). False: each rank is a
    separate replica."""

    @property
    def replicas(self) -> int:
        """Factor by which the engine's GPUs exceed TP size x PP size."""
        return 1 if self.attention else self.count


def dp_ranks(flags: Sequence[str]) -> DpRanks:
    """Read `flags` as SGLang does (``handle_deprecated_dp_attention``, ``handle_dwdp`` and
    ``handle_data_parallelism`` of ``arg_groups/parallel_hook.py``).
    Raises: EngineFlagError, SGLang would refuse them."""
    replicas = int_flag(flags, "--dp", "--dp-size", "--data-parallel-size")
    attention = int_flag(flags, "--attn-dp", "--attn-dp-size", "--attention-data-parallel-size")
    if attention < 1:
        raise EngineFlagError(f"--attn-dp-size must be positive, got {attention}")
    if OLD_FLAG in flags and attention == 1:
        attention, replicas = replicas, 1
    if (dwdp := int_flag(flags, "--dwdp-size")) > 1:
        attention, replicas = dwdp, 1
    if attention > 1 and replicas > 1:
        raise EngineFlagError(
            f"--dp-size {replicas} with --attn-dp-size {attention}: SGLang does not support "
            "data-parallel replicas combined with attention data parallelism. Leave --dp-size out"
        )
    return DpRanks(attention, True) if attention > 1 else DpRanks(replicas, False)


def int_flag(flags: Sequence[str], *names: str, default: int = 1) -> int:
    """Return the value of the last of `names` in `flags`, as SGLang does. Raises: EngineFlagError,
    not a whole number."""
    value = default
    for word, following in zip_longest(flags, flags[1:], fillvalue=""):
        name, equals, text = word.partition("=")
        if name in names:
            text = text if equals else following
            try:
                value = int(text)
            except ValueError:
                raise EngineFlagError(f"{name} must be a whole number, got {text!r}") from None
    return value
