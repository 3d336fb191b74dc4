"""A policy of one's own: each request goes to the DP rank that has been idle longest."""

from sglang_sbs.policies import ImmediatePolicy, Instances, Place, PolicySpec, Request


class LongestIdle(ImmediatePolicy):
    def __init__(self) -> None:
        super().__init__()
        self._sent_s: dict[tuple[str, int], float] = {}

    def choose(self, request: Request, instances: Instances, now_s: float) -> Place:
        places = [(instance, rank) for instance in instances for rank in range(instance.dp_size)]
        instance, rank = min(places, key=lambda p: self._sent_s.get((p[0].id, p[1]), 0.0))
        self._sent_s[instance.id, rank] = now_s
        return instance, rank


POLICY = PolicySpec(
    name="longest_idle",
    make=lambda context: LongestIdle(),
    summary="At once, to the DP rank that got nothing for the longest time.",
    choose_when="To see how a policy is written.",
    trade_offs="It does not look at lengths.",
)
