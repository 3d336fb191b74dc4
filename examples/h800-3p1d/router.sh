#!/usr/bin/env bash
# Start the router of the cluster, on ROUTER_HOST. It waits for the instances.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$here/../lib.sh"

usage() {
    cat <<'TEXT'
usage: router.sh [--dry-run]

  --dry-run  print the command instead
  ENV_FILE   settings to read instead of cluster.env

example:
  examples/h800-3p1d/router.sh
TEXT
}

read_flags "$@"
[[ ${#words[@]} -eq 0 ]] || fail "no arguments wanted (see --help)"
read_settings "$here"
need MODEL_PATH ROUTER_HOST PYTHON

flags=(--pd-disaggregation --host 0.0.0.0 --port "$ROUTER_PORT")
for nodes in "${PREFILL_NODES[@]}"; do
    flags+=(--prefill "http://${nodes%% *}:$ENGINE_PORT" "$BOOTSTRAP_PORT")
done
for nodes in "${DECODE_NODES[@]}"; do
    flags+=(--decode "http://${nodes%% *}:$ENGINE_PORT")
done
flags+=(
    --policy sbs
    # Exact prompt lengths: what a batch is packed by.
    --tokenizer-path "$MODEL_PATH"
    --sbs-endforward-bind "tcp://$ROUTER_HOST:$ENDFORWARD_PORT"
    --prometheus-port "$METRICS_PORT"
)
if [[ -n $ENDFORWARD_KEY_FILE ]]; then
    flags+=(--sbs-endforward-key-file "$ENDFORWARD_KEY_FILE")
fi
flags+=(${ROUTER_EXTRA[@]+"${ROUTER_EXTRA[@]}"})
launch "$PYTHON" -m sglang_sbs.launch_router "${flags[@]}"
