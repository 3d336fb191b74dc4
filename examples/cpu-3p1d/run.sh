#!/usr/bin/env bash
# A 3P1D cluster on CPU with its router, until Ctrl-C. Needs 16 GiB of memory.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$here/../lib.sh"

usage() {
    cat <<'TEXT'
usage: run.sh [--dry-run]

  --dry-run  print the commands of all processes instead
  ENV_FILE   settings to read instead of cluster.env

example:
  scripts/install && examples/cpu-3p1d/run.sh
  curl http://127.0.0.1:30000/generate -H 'Content-Type: application/json' \
      -d '{"text": "hello", "sampling_params": {"max_new_tokens": 8}}'
TEXT
}

read_flags "$@"
[[ ${#words[@]} -eq 0 ]] || fail "no arguments wanted (see --help)"
read_settings "$here"
python=${PYTHON:-$here/../../.venv/bin/python}
[[ -x $python ]] || fail "no $python: run scripts/install, or set PYTHON in the env file"

flags=(
    --model-path "${MODEL_PATH:-$(cd "$here/../.." && "$python" -m tools.cpu_engine.tiny_model)}"
    --prefill-instances "$PREFILL_INSTANCES" --decode-instances "$DECODE_INSTANCES"
    --tp-size "$TP" --attn-dp-size "$DP" --page-size "$PAGE_SIZE"
    "--prefill-args=--chunked-prefill-size $((PREFILL_CHUNK_PER_RANK * DP))"
    --virtual-gpu "$VIRTUAL_GPU" --port "$ROUTER_PORT" --router-policy sbs
    ${EXTRA[@]+"${EXTRA[@]}"}
)
if $dry_run; then
    flags+=(--dry-run)
fi
exec "$python" -m sglang_sbs.launch_server "${flags[@]}"
