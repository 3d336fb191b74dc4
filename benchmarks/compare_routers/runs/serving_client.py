"""SGLang's ``bench_serving`` on arrivals from a file: its client and its metrics, our times.

Owns one more dataset for it. Run as a process of its own:

    python -m benchmarks.compare_routers.runs.serving_client URL MODEL ARRIVALS.jsonl RESULT.jsonl

SGLang 0.5.23 sends a dataset at random times of its own, except Mooncake traces whose prompts it
makes up. Its generator can replay times, but nothing on its command line reaches that; so the one
function that paces is called with that switch set.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from tools.cpu_engine.absent_package import AbsentModule

if find_spec("datasets") is None:
    # Only SGLang's image data set uses Hugging Face's package, and it is imported with the others.
    _absent = AbsentModule("datasets")
    _absent.__spec__ = ModuleSpec("datasets", None)
    sys.modules["datasets"] = _absent

from sglang.benchmark import serving
from sglang.benchmark.datasets import DATASET_MAPPING
from sglang.benchmark.datasets.common import BaseDataset, DatasetRow

_NAME = "sbs-arrivals"


class ArrivalsDataset(BaseDataset):  # type: ignore[misc]
    """Requests as :mod:`.clients` writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def from_args(cls, args: Namespace) -> ArrivalsDataset:
        """From bench_serving's ``--dataset-path``."""
        return cls(Path(args.dataset_path))

    def load(self, tokenizer: Any, model_id: str | None = None) -> list[DatasetRow]:
        """All of them, with their times in milliseconds."""
        rows = [orjson.loads(line) for line in self._path.read_bytes().splitlines()]
        return [
            DatasetRow(
                prompt=row["prompt"],
                prompt_len=row["prompt_tokens"],
                output_len=row["output_tokens"],
                timestamp=row["at_ms"],
            )
            for row in rows
        ]


def main(argv: Sequence[str]) -> None:
    """Run SGLang's benchmark; its result with details is one line in the last file."""
    url, model, dataset, output = argv
    DATASET_MAPPING[_NAME] = ArrivalsDataset
    serving.get_request = functools.partial(serving.get_request, use_trace_timestamps=True)
    words = ["bench_serving", "--backend", "sglang", "--base-url", url]
    # Without the second it asks the engines, whose folders may be on another machine.
    words += ["--model", model, "--tokenizer", model]
    words += ["--dataset-name", "custom", "--dataset-path", dataset, "--output-file", output]
    words += ["--output-details", "--disable-tqdm", "--warmup-requests", "0"]
    words += ["--ready-check-timeout-sec", "0"]
    run_benchmark = serving.run_benchmark

    def run(args: Namespace) -> Any:
        args.dataset_name = _NAME
        return run_benchmark(args)

    serving.run_benchmark = run
    sys.argv = words
    serving.cli_main()


if __name__ == "__main__":
    main(sys.argv[1:])
