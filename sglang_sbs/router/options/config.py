"""Settings that each part of the router takes from the command line. Times are in seconds."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_sbs.scheduling.events import InstanceRole

PrefixWish = Literal["auto", "events", "approximate", "off"]
"""Where the router learns cached prefixes. ``auto`` uses events from instances that publish them,
else ``approximate``."""
MAX_PAYLOAD_BYTES = 32 << 20
MAX_BODIES_BYTES = 512 << 20
"""Lower bound of the default of ``--sbs-max-bodies-size``."""
_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def default_bodies_bytes(limits: Sequence[Path] = _MEMORY_LIMITS) -> int:
    """Return a quarter of the memory of the machine or of its control group (files in ``limits``),
    at least ``MAX_BODIES_BYTES``. Bodies are held until their responses end, and many long prompts
    can be in flight at once."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in limits:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return max(MAX_BODIES_BYTES, min(found) // 4)


@dataclass(frozen=True)
class ClientPace:
    """How slowly a client may send a request and read its response, before it is disconnected."""

    grace_s: float = 30.0
    """Time that a client has for the first request head of a connection, and for a body in addition
    to its time at the minimum pace."""
    finish_s: float = 60.0
    """Time that a client which stopped reading has to take the rest of a finished response, or to
    resume a paused stream. Its request occupies a decode rank meanwhile."""
    min_bytes_per_s: int = 16 * 1024


USUAL_PACE = ClientPace()


@dataclass(frozen=True)
class RelayConfig:
    request_timeout_s: float = 1800
    max_attempts: int = 5
    initial_backoff_s: float = 0.05
    max_backoff_s: float = 30.0
    backoff_multiplier: float = 1.5
    jitter_factor: float = 0.2
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    max_bodies_bytes: int = MAX_BODIES_BYTES
    max_samples: int = 10
    """Largest ``n`` (samples per prompt) of a request; sglang_router has the same default."""
    max_units: int = 1024
    """Largest number of prompts times samples in one client request."""
    gang_gate: bool = False
    """Engines may wait a moment for the other requests of a batch (``--sbs-gang-gate on``)."""
    low_priority_values_first: bool = False
    """A smaller number in a request body means a higher priority."""
    transfer_timeout_s: float = 30.0
    """Longest time that an engine may still write KV of a request that prefill abandoned."""
    least_to_refuse_s: float = 0.05
    """Shortest time for which the attempt after a refusal by prefill waits for another refusal
    before decode gets its request."""
    most_to_refuse_s: float = 1.0
    """Longest time for which the attempt after a refusal by prefill waits for another refusal
    before decode gets its request."""
    last_chance_s: float = 5.0
    """Time without a byte after which the stream of a worker that was lost is ended."""
    count_tokens_s: float = 30.0
    """Time limit for an engine to count the tokens of a body (``/v1/messages/count_tokens``)."""
    pace: ClientPace = USUAL_PACE

    @property
    def max_legs_bytes(self) -> int:
        """Limit in bytes on all request bodies sent to engines of one role for one client
        request."""
        return 4 * self.max_payload_bytes


@dataclass(frozen=True)
class BreakerConfig:
    enabled: bool = True
    failure_threshold: int = 10
    success_threshold: int = 3
    timeout_s: float = 60
    window_s: float = 120
    """A worker's failures further apart than this do not count as consecutive."""


@dataclass(frozen=True)
class MonitorConfig:
    startup_timeout_s: float = 1800
    startup_check_interval_s: float = 30
    health_enabled: bool = True
    health_interval_s: float = 60
    health_timeout_s: float = 5
    failure_threshold: int = 3
    success_threshold: int = 2
    health_endpoint: str | None = None
    """Path of ``--health-check-endpoint``; ``None`` selects a check that runs no forward pass."""
    load_poll_interval_s: float | None = 0.075
    """Interval of load polls; ``None``: no polls."""
    doubt_timeout_s: float = 2.0
    """Time limit of a probe of a worker in doubt; a healthy worker answers within milliseconds."""
    fast_s: float = 1.0
    """Interval between probes of a worker that is down or in doubt."""
    nodes_report_s: float = 2.5
    """Longest wait for the reports of ranks on other nodes. It is longer than two heartbeats of the
    plugin, but shorter than a starting scheduler waits for workers."""
    tokenizers_every_s: float = 1.0
    """Interval of checks for engines whose tokenizer was not compared with the router's yet."""
    tokenizers_again_s: float = 10.0
    """Time until an engine that did not answer the comparison of tokenizers is asked again."""
    quiet_s: float = 2.0
    """Silence after which an engine is asked whether it still runs."""
    recheck_every_s: float = 5.0
    """Shortest interval between reads of ``/server_info`` of a healthy worker."""
    api_key: str | None = None


BOOTSTRAP_PORT_ANNOTATION = "sglang.ai/bootstrap-port"
"""Annotation of prefill pods with their bootstrap port; if it is missing, the engine is asked."""
LWS_WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
"""Label with the number that LeaderWorkerSet gives each pod of a group; the leader has 0."""
_LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True, slots=True)
class DiscoveryConfig:
    """Selects worker pods. A selector is ``key=value,...``; empty disables discovery of that
    role."""

    prefill_selector: str = ""
    decode_selector: str = ""
    port: int = 80
    namespace: str | None = None

    def selectors(self) -> list[tuple[InstanceRole, str]]:
        both: dict[InstanceRole, str]
        both = {"prefill": self.prefill_selector, "decode": self.decode_selector}
        return [(role, selector) for role, selector in both.items() if selector]


def parse_selector(words: Sequence[str]) -> str:
    """Return a Kubernetes label selector, ``app=sglang,role=leader``, from
    ``["app=sglang", "role=leader"]`` or one word with spaces or commas. Raises: ValueError, a word
    is not KEY=VALUE, or a key has two values."""
    labels: dict[str, str] = {}
    for item in re.split(r"[\s,]+", " ".join(words).strip()):
        key, equals, value = item.partition("=")
        if not equals or not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(f"{item!r} is not a label: write KEY=VALUE ..., e.g. app=sglang")
        if labels.setdefault(key, value) != value:
            raise ValueError(f"{key} cannot be {labels[key]!r} and {value!r} at once")
    return ",".join(f"{key}={value}" for key, value in labels.items())


@dataclass(frozen=True)
class AccessLog:
    """Selects which responses the access log contains; errors are always logged."""

    slow_s: float = 0.0
    """Log only successes whose first byte took at least this long; infinity logs none."""

    def has(self, status: int, waited_s: float) -> bool:
        return status >= 400 or waited_s >= self.slow_s


def parse_access_log(text: str) -> AccessLog:
    """Parse ``all``, ``errors``, or ``slow:`` and a time in s or ms. Raises: ValueError, none of
    these."""
    if text in ("all", "errors"):
        return AccessLog(0.0 if text == "all" else math.inf)
    found = re.fullmatch(r"slow:([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s)", text)
    if found is None:
        raise ValueError(f"{text!r} is not all, errors or slow:TIME, as in slow:2s or slow:500ms")
    return AccessLog(float(found[1]) / (1000 if found[2] == "ms" else 1))
