"""An open-loop load: requests leave at their arrival times, whatever the server does."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
import orjson

FIRST_TOKEN_ID = 10
"""Prompt tokens are drawn from here up, above the special tokens of common vocabularies."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Poisson arrivals; prompt lengths ``max_prompt_tokens`` x Beta(1, 2), mean 1/3 of it."""

    qps: float
    requests: int
    max_prompt_tokens: int = 3072
    max_new_tokens: int = 8
    vocabulary: int = 400
    """Prompt token ids are drawn below this."""
    seed: int = 1
    content: str = ""
    """Seed of the prompts' tokens. Runs on the same engines need different ones, or the prefix
    cache answers the second."""

    def arrivals(self) -> list[Arrival]:
        """The requests in time order; the same for the same workload."""
        rng = random.Random(self.seed)
        words = random.Random(f"{self.content}/{self.seed}")
        out, at_s = [], 0.0
        for _ in range(self.requests):
            at_s += rng.expovariate(self.qps)
            tokens = max(1, int(rng.betavariate(1, 2) * self.max_prompt_tokens))
            ids = [words.randrange(FIRST_TOKEN_ID, self.vocabulary) for _ in range(tokens)]
            out.append(Arrival(at_s, ids, self.max_new_tokens))
        return out


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    input_ids: list[int]
    max_new_tokens: int
    text: str | None = None
    """Sent instead of the ids, which are then the tokens it has."""


@dataclass(slots=True)
class Sample:
    """The outcome of one request; NaN where it did not get that far.

    Seconds from when it was sent, as SGLang's client counts. That is later than ``at_s`` when the
    host is late to wake the client, which is no time the server took.
    """

    at_s: float
    prompt_tokens: int
    ttft_s: float = math.nan
    e2e_s: float = math.nan
    output_tokens: int = 0
    rid: str = ""
    error: str = ""

    @property
    def completed(self) -> bool:
        return not self.error


class Latency(msgspec.Struct, frozen=True):
    """A distribution in milliseconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Return the distribution of values in seconds; NaN without values."""
        if not seconds:
            return cls(math.nan, math.nan, math.nan)
        ordered = sorted(seconds)
        return cls(
            mean=1e3 * sum(ordered) / len(ordered),
            p50=1e3 * ordered[len(ordered) // 2],
            p99=1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        )


async def run_load(
    url: str,
    arrivals: Sequence[Arrival],
    *,
    timeout_s: float = 120.0,
    on_done: Callable[[Sample], None] = lambda _sample: None,
) -> list[Sample]:
    """Send every request to ``url``/generate at its time, streaming; bounded by ``timeout_s`` each.

    Requests are never dropped or delayed by earlier ones (open loop). Failures are samples too.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start_s = time.monotonic()
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(send_one(session, url, arrival, on_done)))
        return list(await asyncio.gather(*tasks))


async def send_one(
    session: aiohttp.ClientSession,
    url: str,
    arrival: Arrival,
    on_done: Callable[[Sample], None] = lambda _sample: None,
    into: Sample | None = None,
) -> Sample:
    """Send one request now, whatever its arrival time, and read its answer to the end.

    ``into``: filled as the answer comes, for who may give up on it before.
    """
    sample = into or Sample(arrival.at_s, len(arrival.input_ids))
    prompt = {"input_ids": arrival.input_ids} if arrival.text is None else {"text": arrival.text}
    greedy = {"max_new_tokens": arrival.max_new_tokens, "temperature": 0, "ignore_eos": True}
    body = orjson.dumps(prompt | {"sampling_params": greedy, "stream": True})
    headers = {"Content-Type": "application/json"}
    sent_s = time.monotonic()
    last = b""
    try:
        async with session.post(f"{url}/generate", data=body, headers=headers) as response:
            if response.status != 200:
                sample.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    if math.isnan(sample.ttft_s):
                        sample.ttft_s = time.monotonic() - sent_s
                    last = line
                sample.e2e_s = time.monotonic() - sent_s
                _finish(sample, last, arrival.max_new_tokens)
    except (aiohttp.ClientError, TimeoutError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    on_done(sample)
    return sample


def _finish(sample: Sample, last_line: bytes, expected_tokens: int) -> None:
    """Read the last event: token count and how it ended."""
    if not last_line:
        sample.error = "the stream was empty"
        return
    event = orjson.loads(last_line[len(b"data: ") :])
    if "error" in event:
        sample.error = str(event["error"])
        return
    meta = event.get("meta_info", {})
    sample.rid = str(meta.get("id", ""))
    sample.output_tokens = int(meta.get("completion_tokens", 0))
    finish = (meta.get("finish_reason") or {}).get("type")
    if finish == "abort" or sample.output_tokens != expected_tokens:
        sample.error = f"finished by {finish} after {sample.output_tokens} tokens"
