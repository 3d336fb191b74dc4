#!/usr/bin/env bash
# Start this node's part of one SGLang instance. Run it on every node of every instance; cluster.env
# says which node is which.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$here/../lib.sh"

usage() {
    cat <<'TEXT'
usage: engine.sh ROLE INSTANCE NODE_RANK [--dry-run]
       engine.sh --dry-run

  ROLE       prefill or decode
  INSTANCE   0, 1, ...: a line of PREFILL_NODES or DECODE_NODES in cluster.env
  NODE_RANK  0, 1, ...: an address in that line; 0 is the leader
  --dry-run  print the command instead; without ROLE the commands of all nodes

  ENV_FILE   settings to read instead of cluster.env
  ENGINE_MODULE
             sglang.compile_deep_gemm compiles the kernels and ends (default: sglang.launch_server)

example: on the third node of the second prefill instance
  examples/h800-3p1d/engine.sh prefill 1 2
TEXT
}

read_flags "$@"
read_settings "$here"
need MODEL_PATH ROUTER_HOST PYTHON TRANSFER_BACKEND

engine_environment() { # LEADER ADDRESS
    environment=(
        "SGLANG_SBS_ROUTERS=tcp://$ROUTER_HOST:$ENDFORWARD_PORT"
        # All nodes of an instance name its leader, as the router does: what they report is known to
        # be this instance's from the first message on.
        "SGLANG_SBS_INSTANCE_ID=http://$1:$ENGINE_PORT"
        # The address that other instances reach this node by.
        "SGLANG_HOST_IP=$2"
        "GLOO_SOCKET_IFNAME=$SOCKET_IFNAME"
        "NCCL_SOCKET_IFNAME=$SOCKET_IFNAME"
        # DeepEP between nodes is NVSHMEM over RDMA.
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=$SOCKET_IFNAME"
    )
    if [[ -n $IB_DEVICES ]]; then
        # With = these names and no others: mlx5_1 alone would mean mlx5_10 too.
        environment+=("NCCL_IB_HCA==$IB_DEVICES")
    fi
    if [[ -n $IB_GID_INDEX ]]; then
        # Collectives, DeepEP and the KV transfer (Mooncake) each look in a place of their own.
        environment+=(
            "NCCL_IB_GID_INDEX=$IB_GID_INDEX"
            "NVSHMEM_IB_GID_INDEX=$IB_GID_INDEX"
            "MC_GID_INDEX=$IB_GID_INDEX"
        )
    fi
    if [[ -n $ENDFORWARD_KEY_FILE ]]; then
        environment+=("SGLANG_SBS_ENDFORWARD_KEY_FILE=$ENDFORWARD_KEY_FILE")
    fi
}

common_flags() { # LEADER NODES NODE_RANK
    # No --trust-remote-code: SGLang knows DeepSeek-V3, the model's folder need not run code.
    flags=(
        --model-path "$MODEL_PATH" --host 0.0.0.0 --port "$ENGINE_PORT"
        --dist-init-addr "$1:$DIST_INIT_PORT" --nnodes "$2" --node-rank "$3"
        --enable-dp-lm-head
        # The dense layers are replicated: 1/32 of them is no multiple of the FP8 block.
        --moe-dense-tp-size 1
        --moe-a2a-backend deepep
        --disaggregation-transfer-backend "$TRANSFER_BACKEND"
        --page-size "$PAGE_SIZE" --context-length "$CONTEXT_LENGTH" --enable-metrics
        --watchdog-timeout "$WATCHDOG_S"
    )
    if [[ -n $IB_DEVICES ]]; then
        flags+=(--disaggregation-ib-device "$IB_DEVICES")
    fi
}

prefill_flags() {
    flags+=(
        --disaggregation-mode prefill --disaggregation-bootstrap-port "$BOOTSTRAP_PORT"
        --tp-size "$PREFILL_TP" --attn-dp-size "$PREFILL_DP" --ep-size "$PREFILL_EP"
        # auto would hold the buffers of both modes; a role needs one.
        --deepep-mode normal
        # What each DP rank has cached; rank d is at these ports + d of its node.
        --kv-events-config
        '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "buffer_steps": 2000}'
        --chunked-prefill-size $((PREFILL_CHUNK_PER_RANK * PREFILL_DP))
        # Per rank already, SGLang does not divide it: never the smaller limit.
        --max-prefill-tokens $((PREFILL_CHUNK_PER_RANK > 16384 ? PREFILL_CHUNK_PER_RANK : 16384))
        --max-running-requests "$PREFILL_MAX_RUNNING_REQUESTS"
        --mem-fraction-static "$PREFILL_MEM_FRACTION"
        ${PREFILL_EXTRA[@]+"${PREFILL_EXTRA[@]}"}
    )
}

decode_flags() {
    environment+=(
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=$DECODE_DISPATCH_TOKENS_PER_RANK"
    )
    flags+=(
        --disaggregation-mode decode
        --tp-size "$DECODE_TP" --attn-dp-size "$DECODE_DP" --ep-size "$DECODE_EP"
        --deepep-mode low_latency
        --max-running-requests $((DECODE_MAX_RUNNING_PER_RANK * DECODE_DP))
        --cuda-graph-max-bs-decode "$DECODE_MAX_RUNNING_PER_RANK"
        --mem-fraction-static "$DECODE_MEM_FRACTION"
        ${DECODE_EXTRA[@]+"${DECODE_EXTRA[@]}"}
    )
}

engine() { # ROLE INSTANCE NODE_RANK
    local role=$1 instance=$2 rank=$3 instances=() nodes=()
    case $role in
        prefill) instances=("${PREFILL_NODES[@]}") ;;
        decode) instances=("${DECODE_NODES[@]}") ;;
        *) fail "ROLE must be prefill or decode, not $role" ;;
    esac
    [[ $instance =~ ^[0-9]+$ && -n ${instances[instance]:-} ]] ||
        fail "there is no $role instance $instance: cluster.env has ${#instances[@]}, from 0 on"
    read -ra nodes <<<"${instances[instance]}"
    [[ $rank =~ ^[0-9]+$ && -n ${nodes[rank]:-} ]] ||
        fail "$role instance $instance has ${#nodes[@]} nodes, from 0 on, so no node rank $rank"
    engine_environment "${nodes[0]}" "${nodes[rank]}"
    common_flags "${nodes[0]}" "${#nodes[@]}" "$rank"
    "${role}_flags"
    if $dry_run; then
        echo "# $role instance $instance, node rank $rank: on ${nodes[rank]}"
    fi
    launch env "${environment[@]}" "$PYTHON" -m "${ENGINE_MODULE:-sglang.launch_server}" \
        "${flags[@]}"
}

every_engine() { # ROLE INSTANCES...
    local role=$1 instance rank nodes
    shift
    for ((instance = 0; instance < $#; instance++)); do
        read -ra nodes <<<"${*:instance+1:1}"
        for ((rank = 0; rank < ${#nodes[@]}; rank++)); do
            engine "$role" "$instance" "$rank"
        done
    done
}

if [[ ${#words[@]} -eq 3 ]]; then
    engine "${words[@]}"
elif [[ ${#words[@]} -eq 0 ]] && $dry_run; then
    every_engine prefill "${PREFILL_NODES[@]}"
    every_engine decode "${DECODE_NODES[@]}"
else
    usage >&2
    exit 2
fi
