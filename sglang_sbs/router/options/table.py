"""Every flag of the router: name, field, type and help, in the order of ``--help``.

A flag is added here and, if it becomes more than a field, checked in :mod:`.options`. Its default
is its field's, unless it is written here."""

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
            "(SGLANG_SBS_POLICY) go before it", metavar="FILE"),
    ),
    "workers": (
        Option("pd-disaggregation", "", switch,
            "always on. Written without any worker, the router starts and waits for POST /workers"),
        Option("prefill", "prefill", str,
            "a prefill instance and its --disaggregation-bootstrap-port; repeat per instance. "
            "Without a port (or with 'none') the engine is asked for it",
            repeated=True, nargs="+", metavar=("URL", "BOOTSTRAP_PORT"), default=None,
            read=_prefill),
        Option("decode", "decode", str,
            "a decode instance; repeat per instance",
            repeated=True, nargs=1, metavar="URL", default=None,
            read=lambda urls: tuple(normalise_worker_url(url) for (url,) in urls or ())),
        Option("worker-startup-timeout-secs", "monitor.startup_timeout_s", seconds,
            "complain when a worker is not up by then"),
        Option("worker-startup-check-interval", "monitor.startup_check_interval_s", seconds,
            "longest pause between looks at a worker that is starting", metavar="SECONDS"),
    ),
    "workers in Kubernetes": (
        Option("service-discovery", "", switch,
            "find workers as Kubernetes pods: those that are Running and Ready and match a "
            f"selector. Annotate prefill pods with {BOOTSTRAP_PORT_ANNOTATION}. Of a multi-node "
            f"instance only the pod of node rank 0 may match (pods with a label {LWS_WORKER_INDEX} "
            "other than 0 never do). Needs the extra 'kubernetes'"),
        Option("prefill-selector", "", str,
            "labels of prefill pods: app=sglang component=prefill",
            nargs="+", metavar="KEY=VALUE", default=()),
        Option("decode-selector", "", str,
            "labels of decode pods: app=sglang component=decode",
            nargs="+", metavar="KEY=VALUE", default=()),
        Option("service-discovery-port", "", port, "port the engines serve HTTP at", default=80),
        Option("service-discovery-namespace", "", str,
            "only pods of this namespace; without it of all, which needs a ClusterRole",
            metavar="NAME"),
    ),
    "policy": (
        Option("policy", "scheduler.policy", str,
            "sbs: staggered batches. Immediate ones: round_robin, random, power_of_two, "
            "least_requests, least_tokens; random_rank (what SGLang does by itself), eta (earliest "
            "predicted finish), session (a conversation stays on one DP rank, whatever is there). "
            "`sglang-sbs policies` says when to choose which, and names those you installed. Stock "
            f"names without a twin ({', '.join(NEAREST_POLICY)}) are mapped to the nearest, with a "
            "warning", completes=policy_names),
        Option("sbs-trigger", "scheduler.trigger", TRIGGERS,
            "adaptive: ahead of the predicted end of a pass. paper: Algorithm 1, to the letter"),
        Option("sbs-decode", "scheduler.decode_rule", DECODE_RULES,
            "rule for the decode rank. potential: where the largest batch and KV load of any rank "
            "grow least. iqr: Algorithm 3, to the letter"),
        Option("sbs-iqr-k", "scheduler.iqr_k", non_negative,
            "k of Algorithm 3, with --sbs-decode iqr: ranks with a KV load above Q3 + k IQR are "
            "masked"),
        Option("sbs-endforward-bind", "endforward_bind", str,
            "where engines' EndForward messages arrive; without --sbs-endforward-key-file an "
            "address only engines can reach; 'none' turns it off", metavar="ENDPOINT"),
        Option("sbs-endforward-key-file", "endforward_keys", Path,
            "file with the secret (openssl rand -hex 32) that engines name in the variable "
            "SGLANG_SBS_ENDFORWARD_KEY_FILE, too: EndForward is encrypted then, and taken only "
            "from them",
            metavar="FILE", read=lambda path: path and keys_in(path)),
        Option("sbs-n-limit", "scheduler.n_limit", count,
            "N_limit of Algorithm 2: cycles until flow control", hidden=True),
        Option("sbs-queue-timeout-secs", "scheduler.default_timeout_s", seconds,
            "longest wait in the scheduler, then 503"),
        Option("sbs-outage-hold-secs", "scheduler.outage_hold_s", non_negative,
            "when the last instance of a role is gone (down, drained, removed), requests wait so "
            "long for one to come back, then 503; 0: 503 at once"),
        Option("sbs-max-queue-requests", "scheduler.max_queue_requests", positive_int,
            "longest queue in the scheduler, then 429"),
        Option("sbs-max-queue-tokens", "scheduler.max_queue_tokens", count,
            "most prompt tokens waiting in the scheduler, then 429; 0: no limit"),
        Option("sbs-t-default-ms", "scheduler.t_default_s", seconds,
            "T_default: forward time before the first measurement", per_s=1000, hidden=True),
        Option("sbs-max-hold-ms", "scheduler.max_hold_s", seconds,
            "adaptive: no request is held longer than this, or five mean forward times if those "
            "are longer, while an instance could take it", per_s=1000, hidden=True),
        Option("sbs-gang-gate", "", ("on", "off"),
            "engines with the plugin let a batch wait a moment for requests sent with it that are "
            "on their way or in the handshake with decode (SGLANG_SBS_GANG_GATE_MS there, 40 by "
            "default; on several hosts with SGLang 0.5.22 or later only). off: they never do",
            default="on"),
        Option("sbs-prefix-source", "prefix_source", get_args(PrefixWish),
            "how it is known what each rank has cached. events: the KV events engines publish "
            "(--kv-events-config). approximate: from what was sent where. auto: events of "
            "instances that publish them, else approximate. off: prefixes are not looked for"),
        Option("sbs-prefix-index-blocks", "scheduler.prefix_index_blocks", positive_int,
            "KV pages remembered at most, some 100 to 200 bytes each (sbs_prefix_index_blocks)"),
        Option("sbs-event-log", "event_log", Path,
            "record scheduler events and commands for replay", metavar="FILE"),
        Option("sbs-trial", "trial", str,
            "compare --policy with this one on live traffic, in turns, until the difference is "
            "certain: round_robin, or round_robin,slot=180s,p99=5s and more (docs/trial.md)",
            metavar="BASELINE[,KEY=VALUE]", read=lambda text: text and parse_text(text)),
        Option("tokenizer-path", "tokenizer_path", Path,
            "model directory as the engines have it, or the model's id on Hugging Face: exact "
            "prompt lengths for text and chat, and prefixes found by their tokens",
            metavar="DIR_OR_ID"),
        Option("chat-template", "chat_template", Path,
            "template file instead of the tokenizer's own", metavar="FILE"),
        Option("sbs-forward-token-ids", "forward_token_ids", get_args(ForwardTokenIds),
            "send engines token ids instead of text, and with chats, so that they do not tokenize "
            "again. auto: to engines found to come to the same ids as --tokenizer-path. on: "
            "without looking"),
    ),
    "priority, SLO and tenants": (
        Option("schedule-low-priority-values-first", "relay.low_priority_values_first", switch,
            "requests with a smaller number in their field priority go first, as SGLang's flag of "
            "this name has it; give it to engines and router alike. Without it a larger number "
            "goes first"),
        Option("sbs-priority-step-ms", "scheduler.priority_step_s", seconds,
            "a level of priority is worth so much waiting, or five mean forward times if those "
            "are longer; there are 11 levels, -5 to 5, so nobody waits behind a request that came "
            "12 steps later", per_s=1000),
        Option("sbs-refuse-missed-slo", "scheduler.refuse_missed_slo", switch,
            "answer 429 at once to a request that cannot have its first token within its header "
            "x-sgl-ttft-slo-ms. Without it such a request is served late"),
        Option("sbs-tenant-header", "", str,
            "header that names the tenant, e.g. x-tenant-id: tenants with waiting requests then "
            "share the passes. Only what stands before the router may set it: clients could take "
            "any name", metavar="NAME"),
        Option("sbs-tenant-weights", "scheduler.tenant_weights", str,
            "shares of tenants, e.g. gold=3,free=0.5; 1 for all others", metavar="NAME=W,...",
            default=None, read=lambda text: {} if text is None else parse_weights(text)),
    ),
    "serving": (
        Option("host", "host", str, "address to listen at"),
        Option("port", "port", port, "port to listen at"),
        Option("request-timeout-secs", "relay.request_timeout_s", seconds,
            "for a whole request, answer included"),
        Option("max-payload-size", "max_payload_bytes relay.max_payload_bytes", positive_int,
            "largest request body, bytes"),
        Option("sbs-max-bodies-size", "relay.max_bodies_bytes", positive_int,
            "bytes that the bodies of all requests may take together, from the first byte to the "
            "end of the answer; then 503, first for the largest that is still coming in (default: "
            "a quarter of the memory there is, at least 512 MiB)",
            default=None, read=lambda size: size or default_bodies_bytes()),
        Option("sbs-max-samples", "relay.max_samples", positive_int, "largest n of a request"),
        Option("sbs-max-batch", "relay.max_units", positive_int,
            "most requests that one may become: prompts times n"),
        Option("shutdown-grace-period-secs", "shutdown_grace_s", non_negative,
            "how long requests in flight may run on after SIGTERM"),
        Option("kv-transfer-timeout-secs", "relay.transfer_timeout_s", seconds,
            "the engines' own limit on one KV transfer (mooncake: MC_TRANSFER_TIMEOUT). A decode "
            "engine without deferred KV release keeps a cancelled request so long after prefill "
            "gave it up, so that nobody else gets pages that are still written to"),
        Option("max-concurrent-requests", "max_concurrent_requests", int,
            "requests inside at once, each of a batch or of n counted; -1: no limit"),
        Option("queue-size", "queue_size", count, "client requests waiting for that, then 429"),
        Option("queue-timeout-secs", "queue_timeout_s", seconds, "longest wait for that, then 503"),
        Option("rate-limit-tokens-per-second", "rate_limit_per_s", seconds,
            "token bucket: --max-concurrent-requests is its size, a request takes a token and "
            "gives it back at its end, and so many more are added per second",
            default=None, read=lambda rate: rate or 0.0),
        Option("request-id-headers", "request_id_headers", str,
            "headers that may bring a request id",
            nargs="*", metavar="NAME", default=None, read=_header_names),
        Option("cors-allowed-origins", "cors_allowed_origins", str,
            "origins for CORS; * for any", nargs="*", metavar="ORIGIN", read=tuple),
        Option("log-level", "log_level", ("debug", "info", "warn", "error"),
            "debug, info, warn or error"),
        Option("access-log", "access_log", str,
            "answers that the log has a line for: all; errors; slow:2s, errors and those whose "
            "first byte took 2 s or longer", metavar="WHICH", read=parse_access_log,
            default="all", completes=lambda: ("all", "errors", "slow:2s")),
        Option("log-json", "log_json", switch, "one JSON object per line of the log"),
        Option("log-dir", "log_dir", Path, "also log to a file in this directory", metavar="DIR"),
    ),
    "keys and TLS": (
        Option("api-key", "api_key monitor.api_key", str,
            "clients must send it as a bearer token; also used towards engines. Other users of "
            "this machine see it here: better --api-key-file or SGLANG_SBS_API_KEY", metavar="KEY"),
        Option("api-key-file", "", Path,
            "a file that holds the key which clients must send", metavar="FILE"),
        Option("admin-api-key", "admin_api_key", str,
            "for /workers, /flush_cache, /get_loads here and engines' admin endpoints",
            metavar="KEY"),
        Option("admin-api-key-file", "", Path, "a file that holds it; or SGLANG_SBS_ADMIN_API_KEY",
            metavar="FILE"),
        Option("control-plane-api-keys", "control_plane_keys", str,
            "keys for the same endpoints, ID:NAME:ROLE:KEY with the role admin (may) or user (may "
            "not)", nargs="*", metavar="ID:NAME:ROLE:KEY", read=parse_control_keys),
        Option("control-plane-api-keys-file", "", Path,
            "a file that holds them, one a line; or SGLANG_SBS_CONTROL_PLANE_API_KEYS",
            metavar="FILE"),
        Option("control-plane-audit-enabled", "control_plane_audit", switch,
            "log who used them and who was refused"),
        Option("jwt-issuer", "", str,
            "identity provider (OIDC) whose tokens open the endpoints of --control-plane-api-keys "
            "too, e.g. https://login.example.com/realms/ops. Needs the extra 'jwt'", metavar="URL"),
        Option("jwt-audience", "", str, "what tokens must be meant for (aud)", metavar="NAME"),
        Option("jwt-jwks-uri", "", str,
            "the provider's signing keys; without it its discovery document tells where they are",
            metavar="URL"),
        Option("jwt-role-mapping", "", str,
            "the provider's roles (claims roles, role, groups, group) that are admin or user "
            "here; without it they must be called so", nargs="*", metavar="ROLE=admin", default=()),
        Option("tls-cert-path", "tls_cert_path", Path,
            "certificate to serve HTTPS with", metavar="FILE"),
        Option("tls-key-path", "tls_key_path", Path, "its private key", metavar="FILE"),
        Option("client-cert-path", "client_cert_path", Path,
            "client certificate towards engines", metavar="FILE"),
        Option("client-key-path", "client_key_path", Path, "its private key", metavar="FILE"),
        Option("ca-cert-paths", "ca_cert_paths", Path,
            "CAs that sign engines' certificates", nargs="*", metavar="FILE", read=tuple),
    ),
    "retries, health, circuit breaker": (
        Option("retry-max-retries", "relay.max_attempts", positive_int,
            "attempts per request, before its first byte"),
        Option("retry-initial-backoff-ms", "relay.initial_backoff_s", non_negative,
            "pause before the second attempt", per_s=1000, default=50),
        Option("retry-max-backoff-ms", "relay.max_backoff_s", non_negative,
            "longest pause", per_s=1000, default=30000),
        Option("retry-backoff-multiplier", "relay.backoff_multiplier", seconds,
            "growth of the pause"),
        Option("retry-jitter-factor", "relay.jitter_factor", share,
            "random share of the pause, 0 to 1"),
        Option("disable-retries", "", switch, "one attempt per request"),
        Option("health-check-interval-secs", "monitor.health_interval_s", seconds,
            "between checks of a healthy worker"),
        Option("health-check-timeout-secs", "monitor.health_timeout_s", seconds, "per check"),
        Option("health-failure-threshold", "monitor.failure_threshold", positive_int,
            "failed checks until a worker is down"),
        Option("health-success-threshold", "monitor.success_threshold", positive_int,
            "good checks until it is back"),
        Option("health-check-endpoint", "monitor.health_endpoint", str,
            "default: a check without a forward pass (/ready, /ping)", metavar="PATH"),
        Option("disable-health-check", "monitor.health_enabled", switch,
            "check only after failures", read=not_),
        Option("cb-failure-threshold", "breaker.failure_threshold", positive_int,
            "consecutive failures that open the breaker"),
        Option("cb-success-threshold", "breaker.success_threshold", positive_int,
            "successes that close it"),
        Option("cb-timeout-duration-secs", "breaker.timeout_s", seconds, "open until then"),
        Option("cb-window-duration-secs", "breaker.window_s", seconds,
            "failures further apart are not consecutive"),
        Option("disable-circuit-breaker", "breaker.enabled", switch, "never open", read=not_),
    ),
    "metrics": (
        Option("prometheus-host", "prometheus_host", str, "address of /metrics"),
        Option("prometheus-port", "prometheus_port", port,
            "port of /metrics; front ends of a --sbs-scheduler: the ports after it"),
        Option("prometheus-duration-buckets", "prometheus_duration_buckets", float,
            "histogram buckets, seconds", nargs="+", metavar="SECONDS",
            read=lambda buckets: tuple(sorted(buckets)) if buckets else None),
    ),
    "several processes": (
        Option("frontends", "workers", positive_int,
            "front-end processes that share the port, with one scheduler process between them; 1: "
            "all in one process", former="workers"),
        Option("sbs-role", "", get_args(Role),
            "router: everything. On several machines, scheduler (sglang-sbs scheduler): it alone "
            "needs the workers' and policy's flags; front-end, which --sbs-scheduler implies "
            "(with --frontends N: that many)", default="router"),
        Option("sbs-scheduler", "", str,
            "where the schedulers of a front end are, the one to prefer first. Schedulers that "
            "have no --sbs-election get the same list, and the first that is there schedules",
            metavar="tcp://HOST:PORT,..."),
        Option("sbs-listen", "", str,
            "where a scheduler listens for front ends", metavar="tcp://HOST:PORT"),
        Option("sbs-advertise", "", str,
            "the address by which the others know this scheduler (default: that of --sbs-listen)",
            metavar="tcp://HOST:PORT"),
        Option("sbs-election", "", str,
            "which of several schedulers schedules: the one that has this lock, a Kubernetes "
            "Lease (k8s://NAMESPACE/NAME) or a key in etcd (etcd://HOST:2379/KEY)", metavar="URL"),
        Option("sbs-election-lease-secs", "", seconds,
            "a scheduler that has not renewed the lock for so long has lost it", default=2),
        Option("sbs-election-renew-secs", "", seconds,
            "a scheduler that cannot renew it for so long steps down", default=1.5),
        Option("sbs-election-retry-secs", "", seconds,
            "between renewals, and between looks at another's lock", default=0.3),
        Option("sbs-scheduler-key-file", "", Path,
            "file with the secret that front ends and schedulers share (openssl rand -hex 32); "
            "required unless their addresses are of this machine only; none: they believe whoever "
            "reaches them", metavar="FILE", former="sbs-key-file",
            why_renamed="engines' SGLANG_SBS_KEY_FILE was another secret, that of "
            "--sbs-endforward-key-file"),
        Option("sbs-take-over", "take_over", switch,
            "rolling restart: take the port over from the router (with --frontends 2 or more) that "
            "serves it now, which then finishes what it has and ends; no request is lost"),
        Option("sbs-parent-fd", "parent_fd", int, internal=True),
        Option("sbs-listen-fds", "listen_fds", str, internal=True,
            read=lambda text: tuple(map(int, text.split(","))) if text else ()),
    ),
    "traces": (
        Option("enable-trace", "", switch, "send OpenTelemetry spans; needs the extra 'trace'"),
        Option("otlp-traces-endpoint", "", str, "OTLP collector, gRPC", default="localhost:4317",
            metavar="HOST:PORT"),
    ),
    "of sglang_router": IGNORED_OPTIONS,
}
# fmt: on
