"""One case: a router of its own, a probe beside it, and what the attack did to both."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.hostile.case import Case, Target
from benchmarks.router_processes import Contender, Processes, helper, running
from tools.stand_ins.ports import free_ports

QUIET_S = 2.0
_AFTER_S = 0.5
_CASE_S = 120.0
_LEAST_INPUT_BYTES = 1 << 20
SPECIALS = 255
"""Special tokens of the tokenizer, as many as Llama 3 has."""
_CERT, _KEY = "cert.pem", "key.pem"
_TEMPLATE = """\
{%- if tools %}{{ tools | tojson(indent=4) }}{% endif -%}
{%- if extra %}{{ extra | tojson(indent=4) }}{% endif -%}
{%- for message in messages -%}
<|reserved_special_token_0|>{{ message.role }}
{{ message.content }}<|reserved_special_token_1|>
{%- endfor -%}
"""


@dataclass
class Row:
    case: str
    about: str
    worst_delay_ms: float
    """The longest wait for an answer to the probe, from the attack's beginning to half a second
    after its end."""
    baseline_ms: float
    memory_ratio: float
    """Peak resident memory less that before, over the size of what was sent, or over 1 MiB."""
    grown_mib: float
    sent_bytes: int
    seconds: float
    probes: int
    probe_failures: int
    """Probes without an answer, or with another status than 200."""
    answers: dict[str, int] = field(default_factory=dict)


async def measure(case: Case, engines: tuple[int, int], folder: Path) -> Row:
    """``folder``: what :func:`write_files` wrote. Raises: RuntimeError, the router does not start
    or the probe gets no answers."""
    endforward_port = free_ports(1)[0] if case.endforward else 0
    bind = f"tcp://127.0.0.1:{endforward_port}" if endforward_port else "none"
    flags: tuple[str, ...] = (
        *("--policy", case.policy, "--log-level", "error"),
        *("--sbs-endforward-bind", bind),
    )
    if case.tokenizer:
        flags += ("--tokenizer-path", str(folder))
    if case.tls:
        flags += ("--tls-cert-path", str(folder / _CERT), "--tls-key-path", str(folder / _KEY))
    router = Contender(
        "ours",
        case.module,
        (*flags, *case.flags),
        tls=case.tls,
        wrapper=("prlimit", f"--nofile={case.descriptors}") if case.descriptors else (),
    )
    async with running(router, *engines) as started, _probing(started.port, case) as answers:
        quiet_s = time.monotonic()
        await asyncio.sleep(QUIET_S)
        target = Target(started.port, *engines, endforward_port, case.tls)
        before_bytes = started.processes.resident_bytes()
        _forget_peak(started.processes)
        begin_s = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CASE_S):
                await case.attack(target)
        end_s = time.monotonic()
        await asyncio.sleep(_AFTER_S)
        grown = max(0, _peak_bytes(started.processes) - before_bytes)
    baseline = [took_s for at_s, took_s, _ in answers if quiet_s <= at_s < begin_s]
    probed = [answer for answer in answers if answer[0] + answer[1] >= begin_s]
    if not baseline or not probed:
        raise RuntimeError(f"{case.name}: the probe got no answers")
    return Row(
        case=case.name,
        about=case.about,
        worst_delay_ms=1e3 * max(took_s for _, took_s, _ in probed),
        baseline_ms=1e3 * max(baseline),
        memory_ratio=grown / max(_LEAST_INPUT_BYTES, target.sent_bytes),
        grown_mib=grown / (1 << 20),
        sent_bytes=target.sent_bytes,
        seconds=end_s - begin_s,
        probes=len(probed),
        probe_failures=sum(status != 200 for _, _, status in probed),
        answers=dict(target.statuses),
    )


_Answer = tuple[float, float, int]


@asynccontextmanager
async def _probing(port: int, case: Case) -> AsyncIterator[list[_Answer]]:
    """Entered with the first answer; the answers are whole when it is left."""
    words = [word for word in ("tls", "reconnects") if getattr(case, word)]
    answers: list[_Answer] = []

    def add(line: bytes) -> None:
        at_s, took_s, status = line.split()
        answers.append((float(at_s), float(took_s), int(status)))

    async with helper("benchmarks.hostile.probe", str(port), *words) as probe:

        async def collect() -> None:
            async for line in probe.stdout:
                add(line)

        add(await probe.stdout.readline())
        collecting = asyncio.create_task(collect())
        try:
            yield answers
        finally:
            probe.stdin.close()
            await collecting


def _peak_bytes(processes: Processes) -> int:
    """The most that was resident since :func:`_forget_peak`, of all of them."""
    total = 0
    for pid in processes.pids():
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += 1024 * int(status.split("VmHWM:")[1].split()[0])
    return total


def _forget_peak(processes: Processes) -> None:
    for pid in processes.pids():
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def write_files(folder: Path) -> None:
    """Write the files routers need: a tokenizer with a chat template, a certificate and its key."""
    _write_tokenizer(folder)
    command = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    files = ("-keyout", str(folder / _KEY), "-out", str(folder / _CERT))
    subprocess.run(
        [*command, "-nodes", "-days", "2", "-subj", "/CN=localhost", *files],
        check=True,
        capture_output=True,
    )


def _write_tokenizer(folder: Path) -> None:
    """A small tokenizer with the costs per character of a large one, and as many special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["some words, and a fair question. "], trainer)
    tokenizer.add_special_tokens([f"<|reserved_special_token_{at}|>" for at in range(SPECIALS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
