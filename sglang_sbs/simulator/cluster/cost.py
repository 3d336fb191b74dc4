"""Cost models: how long a simulated prefill pass takes. All of :data:`COSTS` agree on balanced
passes, and differ in what an imbalance between DP ranks costs. They fit Table 1 of arXiv 2512.16134
(DeepSeek-V3 on H800), read per prefill instance. A file may contain a model fitted to a real
engine's EndForward reports."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from pathlib import Path

import msgspec


class CostError(ValueError):
    """A cost file or log is unusable; the message names the change to make."""


class PassCost(msgspec.Struct, frozen=True, kw_only=True):
    """T = fixed_s + mean_s * mean_d(n_d) + max_d(max_s * n_d + pair_s * pairs_d + request_s * r_d).

    ``n_d``: extend tokens of rank d. ``pairs_d``: causal attention pairs of rank d, the sum over
    its requests of chunk * (context + chunk / 2). ``r_d``: its requests.
    """

    fixed_s: float
    mean_s: float = 0.0
    """Seconds per token of the mean over ranks."""
    max_s: float = 0.0
    """Seconds per token of the heaviest rank."""
    pair_s: float = 0.0
    """Seconds per attention pair of the heaviest rank."""
    request_s: float = 0.0
    """Seconds per request of the heaviest rank."""

    def pass_s(
        self,
        tokens: Sequence[int],
        pairs: Sequence[float],
        requests: Sequence[int] = (),
        loads_s: Sequence[float] = (),
    ) -> float:
        """Return the forward time of a pass; ``requests`` may be omitted if they cost nothing.
        ``loads_s``: additional time per rank for loading cached KV."""
        counts = requests or (0,) * len(tokens)
        ranks_s = map(self.rank_s, tokens, pairs, counts)
        slowest = max(map(add, ranks_s, loads_s) if loads_s else ranks_s)
        return self.fixed_s + self.mean_s * sum(tokens) / len(tokens) + slowest

    def rank_s(self, tokens: int, pairs: float, requests: int) -> float:
        """Return the seconds that one rank's load adds to a pass; the largest of all ranks
        counts."""
        return self.max_s * tokens + self.pair_s * pairs + self.request_s * requests

    def full_chunk_s(self, chunk_tokens: int) -> float:
        """Return the forward time with a full chunk on every rank, without attention pairs."""
        return self.fixed_s + (self.mean_s + self.max_s) * chunk_tokens

    def of_tokens_only(self, pairs_per_token: float, requests_per_token: float) -> PassCost:
        """Return a cost that depends on tokens only. The time for pairs and requests becomes part
        of ``max_s``, with these numbers per token on the slowest rank."""
        extra_s = self.pair_s * pairs_per_token + self.request_s * requests_per_token
        return PassCost(fixed_s=self.fixed_s, mean_s=self.mean_s, max_s=self.max_s + extra_s)

    def at_speed(self, speed: float) -> PassCost:
        """Return the cost model of an engine that is ``speed`` times as fast."""
        return PassCost(**{name: getattr(self, name) / speed for name in self.__struct_fields__})


_FIXED_S = 0.0943
_SLOPE_S = 8.01e-5
_PAIR_S = 61 * 2.4e-11

COSTS: dict[str, PassCost] = {
    "table": PassCost(fixed_s=_FIXED_S, mean_s=_SLOPE_S, pair_s=_PAIR_S),
    "mixed": PassCost(
        fixed_s=_FIXED_S, mean_s=_SLOPE_S / 3, max_s=_SLOPE_S * 2 / 3, pair_s=_PAIR_S
    ),
    "barrier": PassCost(fixed_s=_FIXED_S, max_s=_SLOPE_S, pair_s=_PAIR_S),
}
"""Cost models by name. ``table``: mean-driven. ``mixed``: a third of the slope on the mean, two
thirds on the slowest, as measured kernels split it. ``barrier``: the slowest rank decides (the
paper's narrative)."""

_FIELDS = ", ".join(PassCost.__struct_fields__)


def find_cost(word: str) -> PassCost:
    """Find a cost model by its name in :data:`COSTS`, or load it from a JSON file. Raises:
    CostError, neither; the message lists the names, or describes the error in the file."""
    if word in COSTS:
        return COSTS[word]
    if not word.endswith(".json"):
        raise CostError(f"{word!r} is not one of {', '.join(COSTS)}, FILE.json")
    return load_cost(Path(word))


def cost_name(word: str) -> str:
    """Return the name of a cost model in rows and titles: a file is named by its stem."""
    return word if word in COSTS else Path(word).stem


def load_cost(path: Path) -> PassCost:
    """Read a cost from JSON: an object with the fields of :class:`PassCost`, or an object that has
    it as ``cost``. Raises: CostError, unreadable or not a cost, with the file and the field."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CostError(f"cost file {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CostError(f"cost file {path} is not valid JSON: {error}") from error
    if isinstance(content, dict) and "cost" in content:
        content = content["cost"]
    if not isinstance(content, dict):
        raise CostError(f"cost file {path} must be a JSON object with fields of {_FIELDS}")
    unknown = sorted(set(content) - set(PassCost.__struct_fields__))
    if unknown:
        raise CostError(f"cost file {path}: unknown field {unknown[0]!r}; known: {_FIELDS}")
    try:
        cost = msgspec.convert(content, PassCost)
    except msgspec.ValidationError as error:
        raise CostError(f"cost file {path}: {error}") from error
    for name, value in msgspec.structs.asdict(cost).items():
        if value < 0:
            wanted = "a finite number of seconds >= 0"
            raise CostError(f"cost file {path}: {name} must be {wanted}, not {value}")
    if cost.full_chunk_s(1) <= 0:
        nothing = "a pass would take no time but for attention pairs and requests"
        raise CostError(f"cost file {path}: {nothing}; set fixed_s, mean_s or max_s")
    return cost


def save_cost(cost: PassCost, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(cost)) + b"\n")
