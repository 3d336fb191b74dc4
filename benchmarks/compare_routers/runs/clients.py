"""The two clients that send a load: our open-loop one, and SGLang's own ``bench_serving``.

Owns how each is started and its outcome as samples. Must not know who answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from benchmarks import CHECKOUT
from benchmarks.demo.load import Arrival, Sample, run_load
from sglang_sbs.cluster.spawn import last_log_lines
from tools.cpu_engine.environment import cpu_engine_environment

CLIENTS = ("open-loop", "bench_serving")
_SERVING_MODULE = "benchmarks.compare_routers.runs.serving_client"


class NotFinishedError(RuntimeError):
    """The client gave no result, as when a request hangs."""


async def send_load(
    client: str,
    url: str,
    arrivals: Sequence[Arrival],
    *,
    timeout_s: float,
    model: Path,
    log: Path,
) -> list[Sample]:
    """Send every request at its time; one sample each, in the order of arrival.

    ``model`` and ``log`` are for ``bench_serving``: its tokenizer, and what it prints.

    Raises:
        NotFinishedError: ``bench_serving`` did not finish; with the end of what it said.
    """
    if client == "open-loop":
        return await run_load(url, arrivals, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory(prefix="sbs-bench-serving-") as folder:
        result = await _run_serving(url, arrivals, timeout_s, model, log, Path(folder))
    return samples_of(result, arrivals, timeout_s)


async def _run_serving(
    url: str,
    arrivals: Sequence[Arrival],
    timeout_s: float,
    model: Path,
    log: Path,
    folder: Path,
) -> dict[str, Any]:
    dataset, output = folder / "arrivals.jsonl", folder / "result.jsonl"
    dataset.write_bytes(
        b"\n".join(
            orjson.dumps(
                {
                    "at_ms": 1e3 * one.at_s,
                    "prompt": one.input_ids if one.text is None else one.text,
                    "prompt_tokens": len(one.input_ids),
                    "output_tokens": one.max_new_tokens,
                }
            )
            for one in arrivals
        )
    )
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _SERVING_MODULE, url, str(model), str(dataset), str(output)),
            stdout=out,
            stderr=out,
            env=_serving_environment(),
        )
    try:
        async with asyncio.timeout(arrivals[-1].at_s + timeout_s + _START_S):
            code = await process.wait()
    except TimeoutError:
        code = -1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0 or not output.is_file():
        raise NotFinishedError(f"bench_serving did not finish. It said:\n{last_log_lines(log)}")
    # SGLang writes NaN, which only the standard library reads.
    result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    return result


def _serving_environment() -> dict[str, str]:
    """Offline; where SGLang lacks its GPU packages, with the stand-ins that CPU engines have."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    paths = (str(CHECKOUT), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if find_spec("triton") is None:
        environment |= cpu_engine_environment(1, None, environment)
    return environment


_START_S = 120.0
"""SGLang's benchmark imports torch before it sends anything."""


def samples_of(
    result: dict[str, Any], arrivals: Sequence[Arrival], timeout_s: float = math.inf
) -> list[Sample]:
    """Samples from what ``--output-details`` writes.

    SGLang's client takes HTTP 200 for success, also when the stream is empty or has only an error
    in it: no first token is a failure here. It waits six hours for an answer; one that took longer
    than ``timeout_s`` is a failure too, as with the other client.
    """
    samples = []
    columns = zip(
        arrivals,
        result["ttfts"],
        result["itls"],
        result["output_lens"],
        result["errors"],
        strict=True,
    )
    for arrival, ttft_s, gaps_s, output_tokens, error in columns:
        sample = Sample(arrival.at_s, len(arrival.input_ids))
        sample.error = str(error or "")
        if not sample.error and output_tokens != arrival.max_new_tokens:
            sample.error = f"finished after {output_tokens} tokens"
        if not sample.error and not ttft_s > 0:
            sample.error = "no token came: the stream was empty, or had an error in it"
        if ttft_s:
            sample.ttft_s = float(ttft_s)
            sample.e2e_s = float(ttft_s) + math.fsum(gaps_s)
            sample.output_tokens = int(output_tokens)
        if not sample.error and sample.e2e_s > timeout_s:
            sample.error = f"TimeoutError: took {sample.e2e_s:.1f} s"
        samples.append(sample)
    return samples
