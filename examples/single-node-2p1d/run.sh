#!/usr/bin/env bash
# Two prefill instances, one decode instance and the router on one node with eight GPUs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$here/../lib.sh"

usage() {
    cat <<'TEXT'
usage: run.sh [PART] [--dry-run]

  PART       prefill-0, prefill-1, decode or router: that one, in this terminal (for systemd, tmux).
             Without PART all of them, with a log each, until Ctrl-C or until one of them ends
  --dry-run  print the commands instead
  ENV_FILE   settings to read instead of cluster.env

example:
  examples/single-node-2p1d/run.sh
  curl http://127.0.0.1:30000/readiness
TEXT
}

read_flags "$@"
read_settings "$here"
need MODEL_PATH PYTHON LOG_DIR

# Ports of an instance, counted from its HTTP port.
BOOTSTRAP=1 NCCL=2 DIST_INIT=3 KV_EVENTS=50 KV_REPLAY=70

engine() { # ROLE PORT FIRST_GPU
    local role=$1 port=$2 first_gpu=$3
    local environment=(
        "SGLANG_SBS_ROUTERS=tcp://127.0.0.1:$ENDFORWARD_PORT"
        "SGLANG_SBS_INSTANCE_ID=http://127.0.0.1:$port"
    )
    local flags=(
        --model-path "$MODEL_PATH" --host 127.0.0.1 --port "$port" --base-gpu-id "$first_gpu"
        # Without these, the instances of one machine would take each other's ports.
        --dist-init-addr "127.0.0.1:$((port + DIST_INIT))" --nccl-port $((port + NCCL))
        --page-size "$PAGE_SIZE" --enable-metrics
        --disaggregation-mode "$role"
    )
    if [[ -n $IB_DEVICES ]]; then
        flags+=(--disaggregation-transfer-backend mooncake --disaggregation-ib-device "$IB_DEVICES")
    else
        flags+=(--disaggregation-transfer-backend mooncake_tcp)
    fi
    if [[ $role == prefill ]]; then
        flags+=(
            --disaggregation-bootstrap-port $((port + BOOTSTRAP))
            --tp-size "$PREFILL_TP" --attn-dp-size "$PREFILL_DP"
            --chunked-prefill-size $((PREFILL_CHUNK_PER_RANK * PREFILL_DP))
            --max-prefill-tokens $((PREFILL_CHUNK_PER_RANK > 16384 ? PREFILL_CHUNK_PER_RANK : 16384))
            --mem-fraction-static "$PREFILL_MEM_FRACTION"
            # What each DP rank has cached: rank d publishes at the first port + d and repeats what
            # was missed at the second + d.
            --kv-events-config "$(
                printf '{"publisher":"zmq","bind":true,"endpoint":"tcp://127.0.0.1:%d","replay_endpoint":"tcp://127.0.0.1:%d"}' \
                    $((port + KV_EVENTS)) $((port + KV_REPLAY))
            )"
            ${PREFILL_EXTRA[@]+"${PREFILL_EXTRA[@]}"}
        )
    else
        flags+=(
            --tp-size "$DECODE_TP" --attn-dp-size "$DECODE_DP"
            --max-running-requests $((DECODE_MAX_RUNNING_PER_RANK * DECODE_DP))
            --cuda-graph-max-bs-decode "$DECODE_MAX_RUNNING_PER_RANK"
            --mem-fraction-static "$DECODE_MEM_FRACTION"
            ${DECODE_EXTRA[@]+"${DECODE_EXTRA[@]}"}
        )
    fi
    launch env "${environment[@]}" "$PYTHON" -m sglang.launch_server "${flags[@]}"
}

router() {
    local flags=(--pd-disaggregation --host "$ROUTER_ADDRESS" --port "$ROUTER_PORT") port
    for port in "${PREFILL_PORTS[@]}"; do
        flags+=(--prefill "http://127.0.0.1:$port" $((port + BOOTSTRAP)))
    done
    flags+=(
        --decode "http://127.0.0.1:$DECODE_PORT" --policy sbs
        --sbs-endforward-bind "tcp://127.0.0.1:$ENDFORWARD_PORT"
        --prometheus-host 127.0.0.1 --prometheus-port "$METRICS_PORT"
    )
    flags+=(--tokenizer-path "$MODEL_PATH" ${ROUTER_EXTRA[@]+"${ROUTER_EXTRA[@]}"})
    launch "$PYTHON" -m sglang_sbs.launch_router "${flags[@]}"
}

part() {
    case $1 in
        prefill-0) engine prefill "${PREFILL_PORTS[0]}" 0 ;;
        prefill-1) engine prefill "${PREFILL_PORTS[1]}" "$PREFILL_TP" ;;
        decode) engine decode "$DECODE_PORT" $((2 * PREFILL_TP)) ;;
        router) router ;;
        *) fail "PART must be one of ${PARTS[*]}, not $1" ;;
    esac
}

PARTS=(prefill-0 prefill-1 decode router)

if [[ ${#words[@]} -eq 1 ]]; then
    part "${words[0]}"
elif [[ ${#words[@]} -gt 1 ]]; then
    fail "one PART at most (see --help)"
elif $dry_run; then
    for name in "${PARTS[@]}"; do
        echo "# $name"
        part "$name"
    done
else
    mkdir -p "$LOG_DIR"
    pids=()
    trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
    trap 'exit 130' INT TERM
    for name in "${PARTS[@]}"; do
        (part "$name") >"$LOG_DIR/$name.log" 2>&1 &
        pids+=($!)
        echo "$name: $LOG_DIR/$name.log"
    done
    echo "http://$ROUTER_ADDRESS:$ROUTER_PORT/readiness is 200 when all are up; Ctrl-C stops them"
    # The first that ends takes the others along.
    wait -n || true
    echo "one of them ended; see the logs in $LOG_DIR" >&2
    exit 1
fi
