"""Agents in a closed loop: contexts that grow by tool results, pauses, and sub-agents.

The shape is that of InferenceX AgentX: prompts of about 135K tokens, of which 95 % come from the
turns before, answers of 850 tokens, pauses of at most 10 s, and first turns without a common
prefix. The recorded traces are not public, so the turns are drawn from a seed.

An agent sends a turn, reads the answer, runs a tool, and sends the whole conversation with the
tool's output. Now and then it starts several sub-agents instead of a tool. Their prompts begin with
the agent's context, and the agent goes on when the last of them is done. When its task is over, the
next agent takes its place. Load is the number of agents, not a rate, because an agent that gets its
answer sooner sends its next turn sooner.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sglang_sbs.simulator.cluster.arrival import Arrival

PAGE_TOKENS = 512
"""Page size of Mooncake's traces; smaller pages take longer to simulate."""
LONGEST_TOKENS = 262_144
"""Limit on a prompt's tokens: a task ends before its prompt would exceed this."""
_FIRST_TOKENS = (10.5, 0.4)
"""(mu, sigma) of the lognormal tokens of an agent's instructions, tools and first files: median
36K, mean 39K."""
_TOOL_TOKENS = (8.05, 1.1)
"""(mu, sigma) of the lognormal tokens of a tool's result: median 3.1K, mean 5.7K."""
_MEAN_OUTPUT_TOKENS = 850
_TURNS = (22, 44)
_MEAN_PAUSE_S = 2.5
_MOST_PAUSE_S = 10.0
_BRANCH_SHARE = 0.03
"""Share of an agent's turns that start sub-agents instead of a tool."""
_SUB_AGENTS = (2, 4)
_SUB_TURNS = (2, 6)
_TASK_TOKENS = 1_000
"""Tokens of a sub-agent's additional instructions."""
_SPREAD_S = 20.0
"""Seconds within which agents in progress at the start send their next turn."""
_NAMES_PER_THREAD = 1 << 16


@dataclass(slots=True)
class _Thread:
    number: int
    session: str
    rng: random.Random
    tokens: int
    """Tokens of the agent's context, including answers."""
    turns: int
    pages: list[int] = field(default_factory=list)
    """Names of the full pages of the agent's context, as far as it was sent."""
    parent: _Thread | None = None
    children: int = 0


class AgentLoop:
    """One run: the initial requests, and the request that follows each answer."""

    def __init__(self, agents: int, duration_s: float, seed: int) -> None:
        """Start the agents. ``duration_s``: time after which nothing is sent."""
        self._duration_s = duration_s
        self._seed = seed
        self._threads: dict[int, _Thread] = {}
        self._started = 0
        self.history: list[int] = []
        """Pages computed before the run, because agents are in the middle of their tasks. Otherwise
        it would begin with computing all contexts at once."""
        rng = random.Random(f"agents {seed}")
        self.first: list[Arrival] = []
        """Initial requests in time order."""
        for _ in range(agents):
            thread = self._begin()
            self._skip(thread, rng.randrange(thread.turns))
            self.first.append(self._turn(thread, rng.uniform(0.0, _SPREAD_S)))
        self.first.sort()

    def after(self, arrival: Arrival, now_s: float) -> list[Arrival]:
        """Return the requests that follow the end of this one, in time order."""
        thread = self._threads[arrival.thread]
        thread.tokens += arrival.output_tokens
        thread.turns -= 1
        return sorted(a for a in self._next(thread, now_s) if a.at_s <= self._duration_s)

    def _next(self, thread: _Thread, now_s: float) -> list[Arrival]:
        pause_s = min(_MOST_PAUSE_S, thread.rng.expovariate(1 / _MEAN_PAUSE_S))
        branches = thread.parent is None and thread.turns and thread.rng.random() < _BRANCH_SHARE
        if branches and thread.tokens + _TASK_TOKENS <= LONGEST_TOKENS:
            thread.children = thread.rng.randint(*_SUB_AGENTS)
            subs = [self._begin(thread) for _ in range(thread.children)]
            return [self._turn(sub, now_s + pause_s) for sub in subs]
        thread.tokens += _lognormal(thread.rng, _TOOL_TOKENS)
        if thread.turns > 0 and thread.tokens <= LONGEST_TOKENS:
            return [self._turn(thread, now_s + pause_s)]
        del self._threads[thread.number]
        if (parent := thread.parent) is not None:
            parent.children -= 1
            parent.tokens += _MEAN_OUTPUT_TOKENS  # summary of the sub-agent's work
            if parent.children:
                return []
            if parent.tokens <= LONGEST_TOKENS:
                return [self._turn(parent, now_s)]
            del self._threads[parent.number]
        return [self._turn(self._begin(), now_s + pause_s)]

    def _begin(self, parent: _Thread | None = None) -> _Thread:
        """Start an agent, or a sub-agent, which begins with its parent's context and
        instructions."""
        number = self._started
        rng = random.Random(f"agent {self._seed} {number}")
        if parent is None:
            tokens = _lognormal(rng, _FIRST_TOKENS)
            thread = _Thread(number, str(number), rng, tokens, rng.randint(*_TURNS))
        else:
            tokens, turns = parent.tokens + _TASK_TOKENS, rng.randint(*_SUB_TURNS)
            pages = list(parent.pages)
            thread = _Thread(number, parent.session, rng, tokens, turns, pages, parent)
        self._started += 1
        self._threads[number] = thread
        return thread

    def _skip(self, thread: _Thread, turns: int) -> None:
        for _ in range(turns):
            grown = thread.tokens + _output_tokens(thread.rng)
            grown += _lognormal(thread.rng, _TOOL_TOKENS)
            if grown > LONGEST_TOKENS:
                break
            self._fill(thread)
            thread.tokens = grown
            thread.turns -= 1
        self.history += thread.pages

    def _turn(self, thread: _Thread, at_s: float) -> Arrival:
        self._fill(thread)
        answer, pages = _output_tokens(thread.rng), tuple(thread.pages)
        return Arrival(
            at_s,
            thread.tokens,
            answer,
            pages,
            thread.session,
            answer_blocks=tuple(_pages_of(thread, thread.tokens + answer)),
            thread=thread.number,
        )

    @staticmethod
    def _fill(thread: _Thread) -> None:
        thread.pages += _pages_of(thread, thread.tokens)


def _pages_of(thread: _Thread, tokens: int) -> list[int]:
    """Return names for the full pages of its first ``tokens`` that have none yet."""
    full = range(len(thread.pages), tokens // PAGE_TOKENS)
    return [thread.number * _NAMES_PER_THREAD + page for page in full]


def _lognormal(rng: random.Random, shape: tuple[float, float]) -> int:
    return min(LONGEST_TOKENS, max(1, round(rng.lognormvariate(*shape))))


def _output_tokens(rng: random.Random) -> int:
    return 1 + int(rng.expovariate(1 / _MEAN_OUTPUT_TOKENS))
