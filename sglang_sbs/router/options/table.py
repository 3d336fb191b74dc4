"""Lists every flag of the router: name, field, type and help, in the order of ``--help``.

To add a flag, list it here and, if its value is more than a field, check it in :mod:`.options`. Its
default is that of its field, unless it is given here."""

from __future__ import annotations

from collections.abc import Sequence
from operator import not_
from pathlib import Path
from typing import get_args

from sglang_sbs.router.engines.urls import normalise_worker_url
from sglang_sbs.router.options.config import (
    BOOTSTRAP_PORT_ANNOTATION,
    LWS_WORKER_INDEX,
    PrefixWish,
    default_bodies_bytes,
    parse_access_log,
)
from sglang_sbs.router.options.keys import parse_control_keys
from sglang_sbs.router.options.option import (
    Option,
    count,
    non_negative,
    port,
    positive_int,
    prefill_of,
    seconds,
    share,
    switch,
)
from sglang_sbs.router.options.router_options import REQUEST_ID_HEADERS, ForwardTokenIds
from sglang_sbs.router.options.several import Role
from sglang_sbs.router.options.stock import IGNORED_OPTIONS, NEAREST_POLICY
from sglang_sbs.scheduling.config import DECODE_RULES, TRIGGERS
from sglang_sbs.scheduling.policy_registry import policy_names
from sglang_sbs.scheduling.queue.fairness import parse_weights
from sglang_sbs.trial.spec import parse_text
from sglang_sbs.wire.curve import keys_in


def _prefill(entries: list[Sequence[str]] | None) -> tuple[tuple[str, int | None], ...]:
    pairs = map(prefill_of, entries or ())
    return tuple((normalise_worker_url(url), port) for url, port in pairs)


def _header_names(names: list[str] | None) -> tuple[str, ...]:
    return tuple(name.lower() for name in names or ()) or REQUEST_ID_HEADERS


# fmt: off
GROUPS: dict[str, tuple[Option, ...]] = {
    "configuration": (
        Option("config", "", Path,
            "YAML file with one key per flag, e.g. policy: sbs. Flags and environment variables "
            "(SGLANG_SBS_POLICY) take precedence", metavar="FILE"),
    ),
    "workers": (
        Option("pd-disaggregation", "", switch,
            "always on. Without any worker flag, the router starts and waits for POST /workers"),
        Option("prefill", "prefill", str,
            "prefill instance and its --disaggregation-bootstrap-port; repeat per instance. "
            "Without a port (or with 'none') the router asks the engine for it",
            repeated=True, nargs="+", metavar=("URL", "BOOTSTRAP_PORT"), default=None,
            read=_prefill),
        Option("decode", "decode", str,
            "decode instance; repeat per instance",
            repeated=True, nargs=1, metavar="URL", default=None,
            read=lambda urls: tuple(normalise_worker_url(url) for (url,) in urls or ())),
        Option("worker-startup-timeout-secs", "monitor.startup_timeout_s", seconds,
            "log an error if a worker is not up after this time"),
        Option("worker-startup-check-interval", "monitor.startup_check_interval_s", seconds,
            "longest pause between checks of a starting worker", metavar="SECONDS"),
    ),
    "workers in Kubernetes": (
        Option("service-discovery", "", switch,
            "discover workers as Kubernetes pods that are Running and Ready and match a "
            f"selector. Annotate prefill pods with {BOOTSTRAP_PORT_ANNOTATION}. Of a multi-node "
            "instance only the pod of node rank 0 may match (pods with a label "
            f"{LWS_WORKER_INDEX} other than 0 are skipped). Needs the extra 'kubernetes'"),
        Option("prefill-selector", "", str,
            "labels of prefill pods: app=sglang component=prefill",
            nargs="+", metavar="KEY=VALUE", default=()),
        Option("decode-selector", "", str,
            "labels of decode pods: app=sglang component=decode",
            nargs="+", metavar="KEY=VALUE", default=()),
        Option("service-discovery-port", "", port, "port where engines serve HTTP", default=80),
        Option("service-discovery-namespace", "", str,
            "watch only pods of this namespace; the default is all namespaces, which needs a "
            "ClusterRole",
            metavar="NAME"),
    ),
    "policy": (
        Option("policy", "scheduler.policy", str,
            "sbs: staggered batches. Immediate policies: round_robin, random, power_of_two, "
            "least_requests, least_tokens, random_rank (SGLang's own behavior), eta (earliest "
            "predicted finish), session (a conversation stays on one DP rank, regardless of "
            "its load). `sglang-sbs policies` explains when to choose which and lists "
            f"installed ones. Stock names without an equivalent ({', '.join(NEAREST_POLICY)}) "
            "are mapped to the nearest, with a warning", completes=policy_names),
        Option("sbs-trigger", "scheduler.trigger", TRIGGERS,
            "adaptive: dispatch ahead of the predicted end of a pass. paper: Algorithm 1 as "
            "published"),
        Option("sbs-decode", "scheduler.decode_rule", DECODE_RULES,
            "rule for the decode rank. potential: least growth of the largest batch and KV load "
            "of any rank. iqr: Algorithm 3 as published"),
        Option("sbs-iqr-k", "scheduler.iqr_k", non_negative,
            "k of Algorithm 3, with --sbs-decode iqr: ranks with a KV load above Q3 + k IQR are "
            "masked"),
        Option("sbs-endforward-bind", "endforward_bind", str,
            "address that receives engines' EndForward messages; without "
            "--sbs-endforward-key-file choose one that only engines can reach; 'none' disables "
            "it", metavar="ENDPOINT"),
        Option("sbs-endforward-key-file", "endforward_keys", Path,
            "file with the secret (openssl rand -hex 32) that engines set with "
            "SGLANG_SBS_ENDFORWARD_KEY_FILE. EndForward is then encrypted, and only engines "
            "with the secret are accepted",
            metavar="FILE", read=lambda path: path and keys_in(path)),
        Option("sbs-n-limit", "scheduler.n_limit", count,
            "N_limit of Algorithm 2: cycles until flow control", hidden=True),
        Option("sbs-queue-timeout-secs", "scheduler.default_timeout_s", seconds,
            "longest wait in the scheduler, then 503"),
        Option("sbs-outage-hold-secs", "scheduler.outage_hold_s", non_negative,
            "how long requests wait after the last instance of a role is gone (down, drained, "
            "removed), then 503; 0: 503 at once"),
        Option("sbs-max-queue-requests", "scheduler.max_queue_requests", positive_int,
            "maximum number of requests waiting in the scheduler; further requests get 429"),
        Option("sbs-max-queue-tokens", "scheduler.max_queue_tokens", count,
            "maximum number of prompt tokens waiting in the scheduler; further requests get "
            "429; 0: no limit"),
        Option("sbs-t-default-ms", "scheduler.t_default_s", seconds,
            "T_default: forward time before the first measurement", per_s=1000, hidden=True),
        Option("sbs-max-hold-ms", "scheduler.max_hold_s", seconds,
            "adaptive: longest hold of a request that an instance could take, or five mean "
            "forward times if that is longer", per_s=1000, hidden=True),
        Option("sbs-gang-gate", "", ("on", "off"),
            "engines with the plugin let a batch wait a moment for its requests that are still "
            "on their way or in the handshake with decode (SGLANG_SBS_GANG_GATE_MS on engines, "
            "40 by default; on several hosts with SGLang 0.5.22 or later only). off: they never "
            "wait", default="on"),
        Option("sbs-prefix-source", "prefix_source", get_args(PrefixWish),
            "source of the prefixes cached on each rank. events: the KV events engines publish "
            "(--kv-events-config). approximate: where earlier prompts were sent. auto: events "
            "of instances that publish them, else approximate. off: ignore prefixes"),
        Option("sbs-prefix-index-blocks", "scheduler.prefix_index_blocks", positive_int,
            "maximum number of KV pages remembered, about 100 to 200 bytes each "
            "(sbs_prefix_index_blocks)"),
        Option("sbs-event-log", "event_log", Path,
            "record scheduler events and commands for replay; a restart keeps the FILE of the run "
            "before as FILE.1", metavar="FILE"),
        Option("sbs-trial", "trial", str,
            "compare --policy with this baseline on live traffic, in alternating slots, until "
            "the difference is certain: round_robin, or round_robin,slot=180s,p99=5s and more "
            "(docs/trial.md)",
            metavar="BASELINE[,KEY=VALUE]", read=lambda text: text and parse_text(text)),
        Option("tokenizer-path", "tokenizer_path", Path,
            "model directory as the engines have it, or the model's id on Hugging Face: gives "
            "exact prompt lengths for text and chat, and matches prefixes by tokens",
            metavar="DIR_OR_ID"),
        Option("chat-template", "chat_template", Path,
            "template file that replaces the tokenizer's own", metavar="FILE"),
        Option("sbs-forward-token-ids", "forward_token_ids", get_args(ForwardTokenIds),
            "send engines token ids with chats and in place of text, so that they do not "
            "tokenize again. auto: to engines whose ids match those of --tokenizer-path. on: "
            "without that check"),
    ),
    "priority, SLO and tenants": (
        Option("schedule-low-priority-values-first", "relay.low_priority_values_first", switch,
            "requests with a smaller number in the field priority go first, as with SGLang's "
            "flag of this name; set it on engines and router alike. By default larger numbers "
            "go first"),
        Option("sbs-priority-step-ms", "scheduler.priority_step_s", seconds,
            "one level of priority outweighs this much waiting, or five mean forward times if "
            "that is longer; there are 11 levels, -5 to 5, so a request is never overtaken by "
            "one that arrived 12 steps later", per_s=1000),
        Option("sbs-refuse-missed-slo", "scheduler.refuse_missed_slo", switch,
            "reject a request with 429 at once if its first token cannot arrive within its "
            "header x-sgl-ttft-slo-ms. By default it is served late"),
        Option("sbs-tenant-header", "", str,
            "header with the tenant's name, e.g. x-tenant-id: tenants with waiting requests "
            "share the passes. Only a proxy before the router may set it, because clients could "
            "use any name", metavar="NAME"),
        Option("sbs-tenant-weights", "scheduler.tenant_weights", str,
            "shares of tenants, e.g. gold=3,free=0.5; all others have 1", metavar="NAME=W,...",
            default=None, read=lambda text: {} if text is None else parse_weights(text)),
    ),
    "serving": (
        Option("host", "host", str, "address for clients"),
        Option("port", "port", port, "port for clients"),
        Option("request-timeout-secs", "relay.request_timeout_s", seconds,
            "time limit for a whole request, response included"),
        Option("max-payload-size", "max_payload_bytes relay.max_payload_bytes", positive_int,
            "largest request body in bytes"),
        Option("sbs-max-bodies-size", "relay.max_bodies_bytes", positive_int,
            "bytes that the bodies of all requests may use together, from their first byte to "
            "the end of the response; then 503, first for the largest unfinished body (default: "
            "a quarter of the memory, at least 512 MiB)",
            default=None, read=lambda size: size or default_bodies_bytes()),
        Option("sbs-max-samples", "relay.max_samples", positive_int, "largest n of a request"),
        Option("sbs-max-batch", "relay.max_units", positive_int,
            "maximum number of requests made from one client request: prompts times n"),
        Option("shutdown-grace-period-secs", "shutdown_grace_s", non_negative,
            "how long requests in flight may continue after SIGTERM"),
        Option("kv-transfer-timeout-secs", "relay.transfer_timeout_s", seconds,
            "the engines' own limit on one KV transfer (mooncake: MC_TRANSFER_TIMEOUT). After "
            "prefill gives a request up, a decode engine without deferred KV release keeps it "
            "for this long, so that its pages are not reused while prefill may still write them"),
        Option("max-concurrent-requests", "max_concurrent_requests", int,
            "maximum number of concurrent requests (each of a batch or of n counts); -1: no "
            "limit"),
        Option("queue-size", "queue_size", count,
            "maximum number of requests waiting for a --max-concurrent-requests slot; further "
            "requests get 429"),
        Option("queue-timeout-secs", "queue_timeout_s", seconds,
            "longest wait for a --max-concurrent-requests slot, then 503"),
        Option("rate-limit-tokens-per-second", "rate_limit_per_s", seconds,
            "token bucket of size --max-concurrent-requests: a request takes a token and "
            "returns it at its end, and this many are added per second",
            default=None, read=lambda rate: rate or 0.0),
        Option("request-id-headers", "request_id_headers", str,
            "headers that may carry a request id",
            nargs="*", metavar="NAME", default=None, read=_header_names),
        Option("cors-allowed-origins", "cors_allowed_origins", str,
            "origins allowed by CORS; * for any", nargs="*", metavar="ORIGIN", read=tuple),
        Option("log-level", "log_level", ("debug", "info", "warn", "error"),
            "debug, info, warn or error"),
        Option("access-log", "access_log", str,
            "responses to log: all; errors; slow:2s, errors and responses whose first byte took "
            "2 s or longer", metavar="WHICH", read=parse_access_log,
            default="all", completes=lambda: ("all", "errors", "slow:2s")),
        Option("log-json", "log_json", switch,
            "write each log record as a JSON object on one line"),
        Option("log-dir", "log_dir", Path, "also log to a file in this directory", metavar="DIR"),
    ),
    "keys and TLS": (
        Option("api-key", "api_key monitor.api_key", str,
            "key that clients must send as a bearer token; also sent to engines. Other users of "
            "this machine can see it here: prefer --api-key-file or SGLANG_SBS_API_KEY",
            metavar="KEY"),
        Option("api-key-file", "", Path,
            "file with the key that clients must send", metavar="FILE"),
        Option("admin-api-key", "admin_api_key", str,
            "key for /workers, /flush_cache, /get_loads and engines' admin endpoints",
            metavar="KEY"),
        Option("admin-api-key-file", "", Path,
            "file with the admin key; or set SGLANG_SBS_ADMIN_API_KEY",
            metavar="FILE"),
        Option("control-plane-api-keys", "control_plane_keys", str,
            "keys for the admin endpoints, ID:NAME:ROLE:KEY with the role admin (allowed) or "
            "user (not allowed)", nargs="*", metavar="ID:NAME:ROLE:KEY", read=parse_control_keys),
        Option("control-plane-api-keys-file", "", Path,
            "file with one such key per line; or set SGLANG_SBS_CONTROL_PLANE_API_KEYS",
            metavar="FILE"),
        Option("control-plane-audit-enabled", "control_plane_audit", switch,
            "log each use of the admin endpoints, refused ones included"),
        Option("jwt-issuer", "", str,
            "identity provider (OIDC) whose tokens also open the admin endpoints, e.g. "
            "https://login.example.com/realms/ops. Needs the extra 'jwt'", metavar="URL"),
        Option("jwt-audience", "", str,
            "required audience of tokens (aud)", metavar="NAME"),
        Option("jwt-jwks-uri", "", str,
            "URL of the provider's signing keys; taken from its discovery document by default",
            metavar="URL"),
        Option("jwt-role-mapping", "", str,
            "provider roles (claims roles, role, groups, group) that mean admin or user here; "
            "by default only roles named admin and user",
            nargs="*", metavar="ROLE=admin", default=()),
        Option("tls-cert-path", "tls_cert_path", Path,
            "certificate for HTTPS", metavar="FILE"),
        Option("tls-key-path", "tls_key_path", Path,
            "private key of --tls-cert-path", metavar="FILE"),
        Option("client-cert-path", "client_cert_path", Path,
            "client certificate for connections to engines", metavar="FILE"),
        Option("client-key-path", "client_key_path", Path,
            "private key of --client-cert-path", metavar="FILE"),
        Option("ca-cert-paths", "ca_cert_paths", Path,
            "CAs that sign the engines' certificates", nargs="*", metavar="FILE", read=tuple),
    ),
    "retries, health, circuit breaker": (
        Option("retry-max-retries", "relay.max_attempts", positive_int,
            "maximum number of attempts per request, before its first byte"),
        Option("retry-initial-backoff-ms", "relay.initial_backoff_s", non_negative,
            "pause before the second attempt", per_s=1000, default=50),
        Option("retry-max-backoff-ms", "relay.max_backoff_s", non_negative,
            "longest pause between attempts", per_s=1000, default=30000),
        Option("retry-backoff-multiplier", "relay.backoff_multiplier", seconds,
            "factor by which the pause grows"),
        Option("retry-jitter-factor", "relay.jitter_factor", share,
            "random share of the pause, 0 to 1"),
        Option("disable-retries", "", switch,
            "make one attempt per request"),
        Option("health-check-interval-secs", "monitor.health_interval_s", seconds,
            "time between checks of a healthy worker"),
        Option("health-check-timeout-secs", "monitor.health_timeout_s", seconds,
            "time limit of one check"),
        Option("health-failure-threshold", "monitor.failure_threshold", positive_int,
            "failed checks before a worker is down"),
        Option("health-success-threshold", "monitor.success_threshold", positive_int,
            "successful checks before it is up again"),
        Option("health-check-endpoint", "monitor.health_endpoint", str,
            "path of the check; default: one without a forward pass (/ready, /ping)",
            metavar="PATH"),
        Option("disable-health-check", "monitor.health_enabled", switch,
            "check workers only after failures", read=not_),
        Option("cb-failure-threshold", "breaker.failure_threshold", positive_int,
            "consecutive failures that open the breaker"),
        Option("cb-success-threshold", "breaker.success_threshold", positive_int,
            "consecutive successes that close it"),
        Option("cb-timeout-duration-secs", "breaker.timeout_s", seconds,
            "how long the breaker stays open"),
        Option("cb-window-duration-secs", "breaker.window_s", seconds,
            "failures further apart are not consecutive"),
        Option("disable-circuit-breaker", "breaker.enabled", switch,
            "never open the breaker", read=not_),
    ),
    "metrics": (
        Option("prometheus-host", "prometheus_host", str, "address of /metrics"),
        Option("prometheus-port", "prometheus_port", port,
            "port of /metrics; front ends of a --sbs-scheduler use the ports after it"),
        Option("prometheus-duration-buckets", "prometheus_duration_buckets", float,
            "histogram buckets, seconds", nargs="+", metavar="SECONDS",
            read=lambda buckets: tuple(sorted(buckets)) if buckets else None),
    ),
    "several processes": (
        Option("frontends", "workers", positive_int,
            "front-end processes that share the port, with one scheduler process; 1: everything "
            "in one process", former="workers"),
        Option("sbs-role", "", get_args(Role),
            "router: everything. For several machines: scheduler (sglang-sbs scheduler), which "
            "alone needs the flags for workers and policy; front-end, implied by "
            "--sbs-scheduler (--frontends sets their number)", default="router"),
        Option("sbs-scheduler", "", str,
            "scheduler addresses for front ends, in order of preference. Schedulers without "
            "--sbs-election get the same list, and the first available one is active",
            metavar="tcp://HOST:PORT,..."),
        Option("sbs-listen", "", str,
            "address where a scheduler accepts front ends", metavar="tcp://HOST:PORT"),
        Option("sbs-advertise", "", str,
            "address by which other processes reach this scheduler (default: --sbs-listen)",
            metavar="tcp://HOST:PORT"),
        Option("sbs-election", "", str,
            "lock that selects the active scheduler: a Kubernetes Lease (k8s://NAMESPACE/NAME) "
            "or a key in etcd (etcd://HOST:2379/KEY). ?lease=6s&renew=5s&retry=0.5s changes its "
            "times", metavar="URL"),
        Option("sbs-election-lease-secs", "", seconds,
            "a scheduler loses the lock if it does not renew it for this long", default=2,
            hidden=True),
        Option("sbs-election-renew-secs", "", seconds,
            "a scheduler steps down if it cannot renew the lock for this long", default=1.5,
            hidden=True),
        Option("sbs-election-retry-secs", "", seconds,
            "time between renewals, and between checks of another scheduler's lock", default=0.3,
            hidden=True),
        Option("sbs-scheduler-key-file", "", Path,
            "file with the secret that front ends and schedulers share (openssl rand -hex 32); "
            "required unless all addresses are local; none: any host that reaches them is "
            "trusted", metavar="FILE", former="sbs-key-file",
            why_renamed="engines' SGLANG_SBS_KEY_FILE was a different secret, that "
            "of --sbs-endforward-key-file"),
        Option("sbs-take-over", "take_over", switch,
            "rolling restart: take over the port from the router (with --frontends 2 or more) "
            "that serves it now, which finishes its requests and exits; no request is lost"),
        Option("sbs-parent-fd", "parent_fd", int, internal=True),
        Option("sbs-listen-fds", "listen_fds", str, internal=True,
            read=lambda text: tuple(map(int, text.split(","))) if text else ()),
    ),
    "traces": (
        Option("enable-trace", "", switch,
            "send OpenTelemetry spans; needs the extra 'trace'"),
        Option("otlp-traces-endpoint", "", str,
            "OTLP collector (gRPC)", default="localhost:4317",
            metavar="HOST:PORT"),
    ),
    "of sglang_router": IGNORED_OPTIONS,
}
# fmt: on
