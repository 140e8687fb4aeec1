#!/usr/bin/env bash
# The quantizer on this machine's GPU:  tests/gpu/quantize.sh [--prebuilt DIR] [--layers N] [--tokens N] [--only PART]
#   parity    every heavy step against the CPU's, memcheck on small cases
#   story     story-22m on the CPU and twice on the GPU, once more after kill -9: bytes, output errors, perplexities
#   big       Llama-3-8B's shapes, random weights and text: seconds by stage
# --prebuilt DIR: uses the programs in DIR (shared libraries in DIR/lib, logs to DIR/logs). --layers: of the big
# model, 32 by default. --tokens: of its calibration, 131072 by default, in windows of 2048. FQ_TEST_DATA: folder with
# models/story-22m, default ../shared. Exit code 0 only when all passed.
set -euo pipefail
cd "$(dirname "$0")/../.."

prebuilt="" layers=32 tokens=131072 only=""
usage() {
  echo "usage: tests/gpu/run.sh quantize [--prebuilt DIR] [--layers N] [--tokens N] [--only parity|story|big]" >&2
  exit 2
}
while [[ $# -gt 0 ]]; do
  case "$1" in
    --prebuilt) prebuilt="$2" ;;
    --layers) layers="$2" ;;
    --tokens) tokens="$2" ;;
    --only) only="$2" ;;
    *) usage ;;
  esac
  shift 2
done
case "$only" in "" | parity | story | big) ;; *) usage ;; esac
source tests/gpu/common.sh
use_programs "$prebuilt" flashquant quantizer_parity_test
program="$build/flashquant"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
failed=0

parity() {
  check quantizer_parity timeout 200 "$tests/quantizer_parity_test" --gtest_filter='*/cuda'
  if command -v compute-sanitizer >/dev/null; then
    check memcheck_quantizer timeout 200 compute-sanitizer --tool memcheck --error-exitcode 9 \
      "$tests/quantizer_parity_test" --gtest_filter='*Curves*/cuda:*OutputEnergy*/cuda:*TheSameInputs*/cuda:*NotPositive*/cuda'
    check racecheck_quantizer timeout 200 compute-sanitizer --tool racecheck --error-exitcode 9 \
      "$tests/quantizer_parity_test" --gtest_filter='*Curves*/cuda:*NotPositive*/cuda'
  else
    echo "skipped memcheck: compute-sanitizer not found"
  fi
}

story() {
  local model="${FQ_TEST_DATA:-../shared}/models/story-22m"
  if [[ ! -r "$model/heldout.txt" ]]; then
    echo "skipped story: needs FQ_TEST_DATA: models/story-22m"
    return
  fi
  local flags=(--input "$model" --method spqr --group-size 128 --density 0.03 --calibration "$model/heldout.txt"
    --calibration-skip 122880 --calibration-tokens 0 --overwrite)
  check story_cpu "$program" quantize "${flags[@]}" --output "$work/cpu" --backend cpu
  check story_cuda "$program" quantize "${flags[@]}" --output "$work/cuda" --backend cuda
  check story_cuda_again "$program" quantize "${flags[@]}" --output "$work/again" --backend cuda
  check repeatable diff -r "$work/cuda" "$work/again"
  # Killed when it has some layers.
  "$program" quantize "${flags[@]}" --output "$work/killed" --backend cuda --quiet >"$logs/killed.log" 2>&1 &
  local victim="$!"
  while kill -0 "$victim" 2>/dev/null && [[ "$(find "$work" -path '*flashquant-layers/*.layer' | wc -l)" -lt 10 ]]; do :; done
  kill -KILL "$victim" 2>/dev/null || true
  wait "$victim" 2>/dev/null || true
  check story_resumed "$program" quantize "${flags[@]}" --output "$work/killed" --backend cuda
  check resumed_some grep -q "finished by an earlier run" "$logs/story_resumed.log"
  check resumed_equal diff -r "$work/cuda" "$work/killed"
  for log in story_cpu story_cuda story_resumed; do tail -n 2 "$logs/$log.log"; done
  grep -h "^total" "$logs/story_cpu.log" "$logs/story_cuda.log"
  check story_compare "$program" compare "$model" "$work/cpu" "$work/cuda" --text "$model/heldout.txt" --context 512 \
    --max-windows 60 --backend cuda
  cat "$logs/story_compare.log"
}

big() {
  cat >"$work/config.json" <<JSON
{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": $layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
 "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
 "rms_norm_eps": 1e-5, "tie_word_embeddings": false}
JSON
  check big timeout 580 "$program" quantize --input "$work/config.json" --output "$work/big" --random-weights 1 \
    --method spqr --group-size 128 --density 0.01 --calibration-tokens "$tokens" --calibration-context 2048 --backend cuda
  grep -vE "^model\.layers\.([2-9]|[1-3][0-9])\." "$logs/big.log" || true
  du -sh "$work/big" || true
}

for part in parity story big; do
  if [[ -z "$only" || "$only" == "$part" ]]; then "$part"; fi
done
if [[ "$failed" != 0 ]]; then echo "FAILED"; fi
exit "$failed"
