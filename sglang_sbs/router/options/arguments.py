"""The argument parser of the router: names, types, defaults and help of its flags.

Owns what ``--help`` says and what argparse can check. Must not know what options become. Every flag
exists as ``--x`` and as ``--router-x`` (the spelling of ``launch_server``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, NoReturn

from sglang_sbs.router.options.config import MAX_PAYLOAD_BYTES, PlanLimits
from sglang_sbs.router.options.platform import add_discovery_flags, add_identity_flags
from sglang_sbs.router.options.request_classes import add_class_flags
from sglang_sbs.router.options.stock import IGNORED_FLAGS, NEAREST_POLICY, REFUSED_FLAGS, Arity
from sglang_sbs.scheduling.config import DECODE_RULES, TRIGGERS, SchedulerConfig

ROLES = ("router", "scheduler", "front-end")
PREFIX_SOURCES = ("auto", "events", "approximate", "off")
FORWARD_TOKEN_IDS = ("auto", "on", "off")

_DEFAULTS = SchedulerConfig()

_EXAMPLE = """\
example:
  # on every engine node: the plugin reports each forward pass to the router
  pip install .     # in a checkout of sglang-sbs
  SGLANG_SBS_ROUTERS=tcp://router:7600 python -m sglang.launch_server \\
      --disaggregation-mode prefill --tp 32 --dp 8 --enable-dp-attention ...
  # on the router node: the command you run today, with --policy sbs
  python -m sglang_sbs.launch_router --pd-disaggregation \\
      --prefill http://p0:30000 8998 --prefill http://p1:30000 8998 \\
      --decode http://d0:30000 --policy sbs
  curl http://localhost:30000/workers        # what it knows of each worker
  curl http://localhost:29000/metrics        # Prometheus

Every flag is also accepted with the prefix --router- (--router-policy sbs). Flags of
sglang_router 0.3.2 that have no meaning here are accepted with a warning.
"""


class FlagError(ValueError):
    """The command line cannot be used; the message names the flag and what to write instead."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def build_parser(prog: str = "python -m sglang_sbs.launch_router") -> argparse.ArgumentParser:
    """The parser; both spellings of every flag, the second one hidden from ``--help``."""
    parser = _Parser(
        prog=prog,
        usage="%(prog)s --prefill URL [BOOTSTRAP_PORT] ... --decode URL ... [--policy sbs] [flags]",
        description="Router for PD-disaggregated SGLang clusters with staggered batch scheduling.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, prefix: str | None = None, without: Container[str] = ()
) -> None:
    """Add the router's flags to ``parser``.

    Args:
        prefix: ``None`` for the router's own parser, where both spellings mean the same. For a
            parser of others only ``--{prefix}x`` is added, with argparse's own ``dest``.
        without: names of flags to leave out.
    """
    own = prefix is None

    def group(title: str) -> Callable[..., None]:
        section = parser.add_argument_group(title if own else f"router: {title}")

        def add(name: str, help_text: str, **kwargs: Any) -> None:
            if name in without:
                return
            default = kwargs.get("default")
            if "action" not in kwargs and "choices" not in kwargs:
                kwargs.setdefault("metavar", _metavar(name))
            shown = "" if default in (None, False, ()) else f" (default: {default})"
            section.add_argument(f"--{prefix or ''}{name}", help=help_text + shown, **kwargs)
            if not own:
                return
            kwargs["default"] = argparse.SUPPRESS
            dest = name.replace("-", "_")
            parser.add_argument(f"--router-{name}", dest=dest, help=argparse.SUPPRESS, **kwargs)

        return add

    add = group("workers")
    add(
        "pd-disaggregation",
        "always on. Written without any worker, the router starts and waits for POST /workers",
        action="store_true",
    )
    add(
        "prefill",
        "a prefill instance and its --disaggregation-bootstrap-port; repeat per instance. Without "
        "a port (or with 'none') the engine is asked for it",
        nargs="+",
        action="append",
        metavar=("URL", "BOOTSTRAP_PORT"),
    )
    add("decode", "a decode instance; repeat per instance", nargs=1, action="append", metavar="URL")
    add(
        "worker-startup-timeout-secs",
        "complain when a worker is not up by then",
        type=_seconds,
        default=1800,
    )
    add(
        "worker-startup-check-interval",
        "longest pause between looks at a worker that is starting",
        type=_seconds,
        default=30,
    )

    add_discovery_flags(group("workers in Kubernetes"), _port)

    add = group("policy")
    add(
        "policy",
        "sbs: staggered batches. Immediate ones: round_robin, random, power_of_two, "
        "least_requests, least_tokens; random_rank (what SGLang does by itself), stale_tokens "
        "(least tokens by loads a second old, as gateways that poll), eta (earliest predicted "
        "finish), session (a conversation stays on one DP rank, whatever is there). "
        f"Stock names without a twin ({', '.join(NEAREST_POLICY)}) are mapped to the "
        "nearest, with a warning",
        default=_DEFAULTS.policy,
    )
    add(
        "sbs-trigger",
        "adaptive: ahead of the predicted end of a pass. paper: Algorithm 1, to the letter",
        choices=TRIGGERS,
        default=_DEFAULTS.trigger,
    )
    add(
        "sbs-decode",
        "rule for the decode rank. potential: where the largest batch and KV load of any rank grow "
        "least. iqr: Algorithm 3, to the letter",
        choices=DECODE_RULES,
        default=_DEFAULTS.decode_rule,
    )
    add(
        "sbs-iqr-k",
        "k of Algorithm 3, with --sbs-decode iqr: ranks with a KV load above Q3 + k IQR are masked",
        type=_non_negative,
        default=_DEFAULTS.iqr_k,
    )
    add(
        "sbs-endforward-bind",
        "where engines' EndForward messages arrive; without --sbs-endforward-key-file an address "
        "only engines can reach; 'none' turns it off",
        default="tcp://0.0.0.0:7600",
        metavar="ENDPOINT",
    )
    add(
        "sbs-endforward-key-file",
        "file with the secret (openssl rand -hex 32) that engines name in SGLANG_SBS_KEY_FILE: "
        "EndForward is encrypted then, and taken only from them",
        type=Path,
        metavar="FILE",
    )
    add(
        "sbs-n-limit",
        "N_limit of Algorithm 2: cycles until flow control",
        type=_count,
        default=_DEFAULTS.n_limit,
    )
    add(
        "sbs-queue-timeout-secs",
        "longest wait in the scheduler, then 503",
        type=_seconds,
        default=_DEFAULTS.default_timeout_s,
    )
    add(
        "sbs-max-queue-requests",
        "longest queue in the scheduler, then 429",
        type=_positive_int,
        default=_DEFAULTS.max_queue_requests,
    )
    add(
        "sbs-max-queue-tokens",
        "most prompt tokens waiting in the scheduler, then 429; 0: no limit",
        type=_count,
        default=_DEFAULTS.max_queue_tokens,
    )
    add(
        "sbs-t-default-ms",
        "T_default: forward time before the first measurement",
        type=_seconds,
        default=_DEFAULTS.t_default_s * 1000,
    )
    add(
        "sbs-max-hold-ms",
        "adaptive: no request is held longer than this, or five mean forward times if those are "
        "longer, while an instance could take it; twice as long if an instance has its prefix "
        "cached",
        type=_seconds,
        default=_DEFAULTS.max_hold_s * 1000,
    )
    add(
        "sbs-gang-gate",
        "engines with the plugin let a batch wait a moment for requests sent with it that are "
        "on their way or in the handshake with decode (SGLANG_SBS_GANG_GATE_MS there, 40 by "
        "default; 0 on several hosts where a DP rank is several processes). off: they never do",
        choices=("on", "off"),
        default="on",
    )
    add(
        "sbs-prefix-source",
        "how it is known what each rank has cached. events: the KV events engines publish "
        "(--kv-events-config). approximate: from what was sent where. auto: events of instances "
        "that publish them, else approximate. off: prefixes are not looked for",
        choices=PREFIX_SOURCES,
        default="auto",
    )
    add(
        "sbs-prefix-index-blocks",
        "KV pages remembered at most, some 100 to 200 bytes each (sbs_prefix_index_blocks)",
        type=_positive_int,
        default=_DEFAULTS.prefix_index_blocks,
    )
    add(
        "sbs-event-log",
        "record scheduler events and commands for replay",
        type=Path,
        metavar="FILE",
    )
    add(
        "tokenizer-path",
        "model directory as the engines have it, or the model's id on Hugging Face: exact prompt "
        "lengths for text and chat, and prefixes found by their tokens",
        type=Path,
        metavar="DIR_OR_ID",
    )
    add("chat-template", "template file instead of the tokenizer's own", type=Path, metavar="FILE")
    add(
        "sbs-forward-token-ids",
        "send engines token ids instead of text, and with chats, so that they do not tokenize "
        "again. auto: to engines found to come to the same ids as --tokenizer-path. on: without "
        "looking",
        choices=FORWARD_TOKEN_IDS,
        default="auto",
    )

    add_class_flags(group("priority, SLO and tenants"), _seconds)

    add = group("serving")
    add("host", "address to listen at", default="0.0.0.0")
    add("port", "port to listen at", type=_port, default=30000)
    add("request-timeout-secs", "for a whole request, answer included", type=_seconds, default=1800)
    add(
        "max-payload-size",
        "largest request body, bytes",
        type=_positive_int,
        default=MAX_PAYLOAD_BYTES,
    )
    add(
        "sbs-max-bodies-size",
        "bytes that the bodies of all requests may take together, from the first byte to the end "
        "of the answer; then 503, first for the largest that is still coming in (default: a "
        "quarter of the memory there is, at least 512 MiB)",
        type=_positive_int,
    )
    add(
        "sbs-max-samples",
        "largest n of a request",
        type=_positive_int,
        default=PlanLimits().samples,
    )
    add(
        "sbs-max-batch",
        "most requests that one may become: prompts times n",
        type=_positive_int,
        default=PlanLimits().units,
    )
    add(
        "shutdown-grace-period-secs",
        "how long requests in flight may run on after SIGTERM",
        type=_non_negative,
        default=180,
    )
    add(
        "max-concurrent-requests",
        "requests inside at once, each of a batch or of n counted; -1: no limit",
        type=int,
        default=-1,
    )
    add("queue-size", "client requests waiting for that, then 429", type=_count, default=100)
    add("queue-timeout-secs", "longest wait for that, then 503", type=_seconds, default=60)
    add(
        "rate-limit-tokens-per-second",
        "token bucket: --max-concurrent-requests is its size, a request takes a token and gives it "
        "back at its end, and so many more are added per second",
        type=_seconds,
    )
    add("request-id-headers", "headers that may bring a request id", nargs="*", metavar="NAME")
    add(
        "cors-allowed-origins",
        "origins for CORS; * for any",
        nargs="*",
        default=(),
        metavar="ORIGIN",
    )
    add(
        "log-level",
        "debug, info, warn or error",
        choices=("debug", "info", "warn", "error"),
        default="info",
    )
    add("log-json", "one JSON object per line of the log", action="store_true")
    add("log-dir", "also log to a file in this directory", type=Path, metavar="DIR")

    add = group("keys and TLS")
    add(
        "api-key",
        "clients must send it as a bearer token; also used towards engines",
        metavar="KEY",
    )
    add(
        "admin-api-key",
        "for /workers, /flush_cache, /get_loads here and engines' admin endpoints",
        metavar="KEY",
    )
    add(
        "control-plane-api-keys",
        "keys for the same endpoints, ID:NAME:ROLE:KEY with the role admin (may) or user (may not)",
        nargs="*",
        default=(),
        metavar="ID:NAME:ROLE:KEY",
    )
    add("control-plane-audit-enabled", "log who used them and who was refused", action="store_true")
    add_identity_flags(add)
    for name, text in (
        ("tls-cert-path", "certificate to serve HTTPS with"),
        ("tls-key-path", "its private key"),
        ("client-cert-path", "client certificate towards engines"),
        ("client-key-path", "its private key"),
    ):
        add(name, text, type=Path, metavar="FILE")
    add(
        "ca-cert-paths",
        "CAs that sign engines' certificates",
        type=Path,
        nargs="*",
        default=(),
        metavar="FILE",
    )

    add = group("retries, health, circuit breaker")
    add(
        "retry-max-retries",
        "attempts per request, before its first byte",
        type=_positive_int,
        default=5,
    )
    add(
        "retry-initial-backoff-ms",
        "pause before the second attempt",
        type=_non_negative,
        default=50,
    )
    add("retry-max-backoff-ms", "longest pause", type=_non_negative, default=30_000)
    add("retry-backoff-multiplier", "growth of the pause", type=_seconds, default=1.5)
    add("retry-jitter-factor", "random share of the pause, 0 to 1", type=_share, default=0.2)
    add("disable-retries", "one attempt per request", action="store_true")
    add(
        "health-check-interval-secs",
        "between checks of a healthy worker",
        type=_seconds,
        default=60,
    )
    add("health-check-timeout-secs", "per check", type=_seconds, default=5)
    add(
        "health-failure-threshold",
        "failed checks until a worker is down",
        type=_positive_int,
        default=3,
    )
    add("health-success-threshold", "good checks until it is back", type=_positive_int, default=2)
    add(
        "health-check-endpoint",
        "default: a check without a forward pass (/ready, /ping)",
        metavar="PATH",
    )
    add("disable-health-check", "check only after failures", action="store_true")
    add(
        "cb-failure-threshold",
        "consecutive failures that open the breaker",
        type=_positive_int,
        default=10,
    )
    add("cb-success-threshold", "successes that close it", type=_positive_int, default=3)
    add("cb-timeout-duration-secs", "open until then", type=_seconds, default=60)
    add(
        "cb-window-duration-secs",
        "failures further apart are not consecutive",
        type=_seconds,
        default=120,
    )
    add("disable-circuit-breaker", "never open", action="store_true")

    add = group("metrics")
    add("prometheus-host", "address of /metrics", default="0.0.0.0")
    add("prometheus-port", "port of /metrics", type=_port, default=29000)
    add(
        "prometheus-duration-buckets",
        "histogram buckets, seconds",
        type=float,
        nargs="+",
        metavar="SECONDS",
    )

    add = group("several processes")
    add(
        "workers",
        "front-end processes that share the port, with one scheduler process between them; 1: all "
        "in one process",
        type=_positive_int,
        default=1,
    )
    add(
        "sbs-role",
        "router: everything. For several router machines, scheduler on one: it alone needs the "
        "workers' and policy's flags; front-end on the others (with --workers N: that many there)",
        choices=ROLES,
        default="router",
    )
    add(
        "sbs-scheduler",
        "where the scheduler listens for front ends, for both of these roles: tcp://HOST:PORT",
        metavar="ENDPOINT",
    )
    add(
        "sbs-key-file",
        "file with the secret that front ends and scheduler share (openssl rand -hex 32); required "
        "unless --sbs-scheduler is an address of this machine only",
        type=Path,
        metavar="FILE",
    )
    add(
        "sbs-take-over",
        "rolling restart: take the port over from the router (with --workers 2 or more) that "
        "serves it now, which then finishes what it has and ends; no request is lost",
        action="store_true",
    )
    if own:  # of the supervisor
        for name, kind in (("sbs-parent-fd", int), ("sbs-listen-fds", str)):
            parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)

    add = group("traces")
    add("enable-trace", "send OpenTelemetry spans; needs the extra 'trace'", action="store_true")
    add("otlp-traces-endpoint", "OTLP collector, gRPC", default="localhost:4317")

    for name, (arity, _) in IGNORED_FLAGS.items():
        _add_unused(parser, name, arity, prefix)
    if not own:
        for name in REFUSED_FLAGS:
            _add_unused(parser, name, "many", prefix)


def _metavar(name: str) -> str:
    last = name.rpartition("-")[2]
    known = {"ms": "MS", "secs": "SECONDS", "host": "HOST", "port": "PORT", "policy": "POLICY"}
    return known.get(last, "N")


def _add_unused(
    parser: argparse.ArgumentParser, name: str, arity: Arity, prefix: str | None
) -> None:
    specs: dict[Arity, dict[str, Any]] = {
        "flag": {"action": "store_true"},
        "one": {"nargs": None},
        "many": {"nargs": "*"},
    }
    options = specs[arity] | {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if prefix is None:
        spellings = (f"--{name}", f"--router-{name}")
        parser.add_argument(*spellings, dest=f"ignored:{name}", **options)
    else:
        parser.add_argument(f"--{prefix}{name}", **options)


def _number(text: str, low: float, high: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _seconds(text: str) -> float:
    return _number(text, 1e-9, 1e9, "a number greater than 0")


def _non_negative(text: str) -> float:
    return _number(text, 0, 1e9, "a number >= 0")


def _share(text: str) -> float:
    return _number(text, 0, 1, "a number from 0 to 1")


def _whole(text: str, low: int, high: int, what: str) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def _positive_int(text: str) -> int:
    return _whole(text, 1, 2**63, "a whole number >= 1")


def _count(text: str) -> int:
    return _whole(text, 0, 2**63, "a whole number >= 0")


def _port(text: str) -> int:
    return _whole(text, 0, 65535, "a port in 0..65535")
