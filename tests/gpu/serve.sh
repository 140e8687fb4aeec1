#!/usr/bin/env bash
# An 8B model's shapes with random weights, written, loaded and served on this machine's GPU:
#   tests/gpu/serve.sh [--prebuilt DIR]
# Prints the time to readiness, tokens/s of 8, 16 and 64 clients at once, and fails when a client or
# the server does, or when KV blocks are in use at the end. FQ_WORK_DIR: where 6 GB are written,
# default /dev/shm. --prebuilt DIR: the program and DIR/lib, logs to DIR/logs.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ "${1:-}" == "--prebuilt" ]]; then
  build="$2"
  export LD_LIBRARY_PATH="$2/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
else
  build=build/cuda-dev
  cmake --preset cuda-dev
  cmake --build --preset cuda-dev --target flashquant
fi
logs="$build/logs"
mkdir -p "$logs"
work="$(mktemp -d "${FQ_WORK_DIR:-/dev/shm}/fq_serve_XXXXXX")"
server=""
# shellcheck disable=SC2317
finish() {
  if [[ -n "$server" ]]; then kill -TERM "$server" 2>/dev/null || true; fi
  rm -rf "$work"
}
trap finish EXIT
program="$build/flashquant"
milliseconds() { echo $(($(date +%s%N) / 1000000)); }

cat >"$work/config.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
 "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
 "rms_norm_eps": 1e-5, "tie_word_embeddings": false}
JSON
"$program" quantize --random-weights 1 --symmetric --input "$work/config.json" --output "$work/model" --quiet

target=127.0.0.1:50551
metrics=127.0.0.1:9564
begin="$(milliseconds)"
"$program" serve --backend cuda --model "$work/model" --context-length 8192 --token-budget 2048 \
  --listen "$target" --metrics-listen "$metrics" --run-ahead >"$logs/serve_8b.log" 2>&1 &
server="$!"
for _ in $(seq 600); do
  if "$program" health --target "$target" >/dev/null 2>&1; then break; fi
  kill -0 "$server" 2>/dev/null || { tail -n 5 "$logs/serve_8b.log"; exit 1; }
  sleep 0.05
done
echo "READY after $(($(milliseconds) - begin)) ms"

status=0
prompt="$(seq -s, 1 512)"
for clients in 8 16 64; do
  pids=()
  begin="$(milliseconds)"
  for i in $(seq "$clients"); do
    "$program" generate --target "$target" --temperature 0 --max-tokens 400 --ignore-eos \
      --prompt-ids "$prompt" >"$work/answer.$i" 2>&1 &
    pids+=("$!")
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  wall=$(($(milliseconds) - begin))
  echo "$clients clients, 512 tokens in, 400 out: $((clients * 400 * 1000 / wall)) tokens/s, $wall ms"
done
if command -v curl >/dev/null; then
  used="$(curl -s "http://$metrics/metrics" | grep '^flashquant_kv_blocks{.*state="used"' | awk '{print $2}')"
  echo "KV blocks in use at the end: $used"
  [[ "$used" == 0 ]] || status=1
fi
kill -TERM "$server"
wait "$server" || status=1
server=""
exit "$status"
