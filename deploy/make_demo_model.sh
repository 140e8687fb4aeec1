#!/usr/bin/env bash
# Makes deploy/demo-model from the BF16 story-22m: the same bytes every time on one kind of processor (the
# calibration runs the engine, whose sums differ in the last bits between kinds).
#
# Usage: deploy/make_demo_model.sh [FLASHQUANT [MODEL_DIR]]
# MODEL_DIR is the unquantized story-22m, by default that of FQ_TEST_DATA (../shared). Its heldout.txt is the
# calibration text from token 122,880 on; perplexities are measured on the tokens before. README.md stays.
set -euo pipefail
cd "$(dirname "$0")/.."

binary="${1:-build/cpu/flashquant}"
model="${2:-${FQ_TEST_DATA:-../shared}/models/story-22m}"
limit_bytes=16000000
[[ -x "$binary" ]] || { echo "no program at $binary; build it or give its path" >&2; exit 66; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$binary" quantize --input "$model" --output "$work/model" --method spqr --group-size 32 --density 0.01 \
  --embedding int8 --calibration "$model/heldout.txt" --calibration-skip 122880
"$binary" inspect "$work/model" --verify | tail -1
cp "$work"/model/* deploy/demo-model/
bytes=$(cat deploy/demo-model/* | wc -c)
echo "deploy/demo-model: $bytes bytes"
((bytes <= limit_bytes)) || { echo "more than $limit_bytes bytes" >&2; exit 65; }
