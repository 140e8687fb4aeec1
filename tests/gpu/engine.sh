#!/usr/bin/env bash
# The CUDA backend on this machine's GPU:  tests/gpu/engine.sh [--prebuilt DIR]
#   every op against the oracle, whole models against the reference and the CPU backend, memcheck on
#   small cases, one prompt and a served load on the demo model, decode and prefill times of an 8B
#   model's shapes beside BF16 (serve.sh loads and serves such a model). One line a check; logs in the build folder.
# --prebuilt DIR: uses the programs in DIR (shared libraries in DIR/lib, logs to DIR/logs).
# FQ_TEST_DATA: folder with models/story-22m, default ../shared. Exit code 0 only when all passed.
set -euo pipefail
cd "$(dirname "$0")/../.."

parity="memory linear attention kv_cache pointwise decoder_variant sample penalty"
prebuilt=""
if [[ "${1:-}" == "--prebuilt" ]]; then prebuilt="$2"; fi
targets=(flashquant model_parity_test)
for op in $parity; do targets+=("${op}_parity_test"); done
source tests/gpu/common.sh
use_programs "$prebuilt" "${targets[@]}"
failed=0

if ! "$tests/pointwise_parity_test" --gtest_list_tests | grep -q cuda; then
  echo "FAILED  no CUDA device that this build can use" >&2
  exit 1
fi
for op in $parity; do
  check "${op}_parity" "$tests/${op}_parity_test" --gtest_filter='*cuda'
done
check model_parity "$tests/model_parity_test"

check complete "$build/flashquant" complete --backend cuda --model deploy/demo-model --temperature 0 \
  --max-tokens 200 --ignore-eos --prompt "Once upon a time"
tail -n 1 "$logs/complete.log"
# A server on the GPU, 32 clients at once, an orderly end.
serve() {
  local target=127.0.0.1:50551 server status=0 clients=()
  "$build/flashquant" serve --backend cuda --model deploy/demo-model --listen "$target" \
    --metrics-listen 127.0.0.1:9564 --run-ahead >"$logs/server.log" 2>&1 &
  server="$!"
  for _ in $(seq 50); do
    kill -0 "$server" 2>/dev/null || return 1
    "$build/flashquant" health --target "$target" >/dev/null 2>&1 && break
    sleep 0.2
  done
  for i in $(seq 32); do
    "$build/flashquant" generate --target "$target" --temperature 0.8 --seed "$i" --max-tokens 100 \
      --prompt "Once upon a time" &
    clients+=("$!")
  done
  for client in "${clients[@]}"; do wait "$client" || status=1; done
  kill -TERM "$server"
  wait "$server" || status=1
  return "$status"
}
check serve serve
tail -n 3 "$logs/server.log"

# The shapes of Llama-3.1-8B, random weights.
cat >"$logs/8b.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
 "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
 "rms_norm_eps": 1e-5, "tie_word_embeddings": false}
JSON
check bench_engine timeout 150 "$build/flashquant" bench engine --backend cuda --config "$logs/8b.json" \
  --batch 1,8,16,32,64 --context 1024 --baseline bf16
cat "$logs/bench_engine.log"
check bench_int4_head timeout 60 "$build/flashquant" bench engine --backend cuda --config "$logs/8b.json" \
  --batch 8,16 --context 1024 --lm-head int4
cat "$logs/bench_int4_head.log"

for dtype in bf16 fp8; do
  check "bench_kv_$dtype" timeout 90 "$build/flashquant" bench engine --backend cuda \
    --config "$logs/8b.json" --batch 8,16,64 --context 1024,8192 --kv-cache-dtype "$dtype"
  cat "$logs/bench_kv_$dtype.log"
done

if command -v compute-sanitizer >/dev/null; then
  check memcheck_attention timeout 120 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$tests/attention_parity_test" --gtest_filter='*HeadSharing*cuda:*DecodeAfter*cuda:*ManyHeads*cuda'
  check memcheck_kv_cache timeout 120 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$tests/kv_cache_parity_test" --gtest_filter='*LongContexts*cuda:*Clamped*cuda:*NotFinite*cuda'
  check memcheck_sample timeout 120 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$tests/sample_parity_test" --gtest_filter='*BannedIds*cuda:*NonFinite*cuda:*BanningTheWhole*cuda'
  check memcheck_penalty timeout 120 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$tests/penalty_parity_test" --gtest_filter='*Extreme*cuda:*OutsideTheVocabulary*cuda:*KeepTheirBits*cuda'
else
  echo "skipped memcheck: compute-sanitizer not found"
fi
exit "$failed"
