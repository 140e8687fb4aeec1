#!/usr/bin/env bash
# Quality of quantized checkpoints: perplexity of a text for BF16, INT4 without outliers and several
# stored densities, as a Markdown table. Not part of the test run (several minutes); its output is in
# deploy/demo-model/README.md.
#
# Usage: tests/quality/quality_table.sh [-b FLASHQUANT] [-m MODEL_DIR] [-t TEXT] [-w WINDOWS] [-o WORK_DIR]
#                                       [CONFIG ...]
# A CONFIG is "GROUP:DENSITY[:EMBEDDING[:RULE]]", for example 128:0.03 or 64:0.02:int8:rescale.
# MODEL_DIR must be an unquantized checkpoint with a tokenizer.
set -euo pipefail
cd "$(dirname "$0")/../.."

data="${FQ_TEST_DATA:-../shared}"
binary=build/cpu/server/flashquant
model="$data/models/story-22m"
text=""
windows=240
work=""
while getopts "b:m:t:w:o:" option; do
  case "$option" in
    b) binary=$OPTARG ;;
    m) model=$OPTARG ;;
    t) text=$OPTARG ;;
    w) windows=$OPTARG ;;
    o) work=$OPTARG ;;
    *) exit 64 ;;
  esac
done
shift $((OPTIND - 1))
text="${text:-$model/heldout.txt}"
configs=("$@")
if [[ ${#configs[@]} -eq 0 ]]; then
  configs=(128:0 128:0.01 128:0.02 128:0.03 128:0.01:bf16:magnitude 128:0.01:bf16:error)
fi
[[ -x "$binary" ]] || { echo "no program at $binary; give it with -b" >&2; exit 66; }
[[ -r "$text" ]] || { echo "no text at $text; give it with -t" >&2; exit 66; }
if [[ -z "$work" ]]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi

perplexity() {
  "$binary" perplexity --model "$1" --text "$text" --max-windows "$windows" 2>/dev/null |
    awk '/^perplexity/ { print $2 }'
}

base=$(perplexity "$model")
echo "| group | outliers | embedding | stored density | bits a weight | tensors MB | relative error | perplexity | over BF16 | won back |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
echo "| - | BF16 | bf16 | - | 16 | - | 0 | $base | - | - |"
without=""
for config in "${configs[@]}"; do
  IFS=: read -r group density embedding rule <<<"$config"
  embedding=${embedding:-bf16}
  rule=${rule:-rescale}
  folder="$work/g$group-d$density-$embedding-$rule"
  if [[ ! -f "$folder/config.json" ]]; then
    "$binary" quantize --input "$model" --output "$folder" --group-size "$group" \
      --density "$density" --embedding "$embedding" --outliers "$rule" --quiet >/dev/null
  fi
  value=$(perplexity "$folder")
  # Won back: share of what INT4 of the same group size without outliers lost (the last one above).
  if [[ "$density" == 0 ]]; then without=$value; fi
  report() { # number at a key of the report's total
    tr -d '\n' <"$folder/quantize_report.json" |
      sed -E "s/.*\"total\": *\{([^}]*)\}.*/\1/; s/.*\"$1\": *([-0-9.e]+).*/\1/"
  }
  tensor_bytes=$(sed -nE 's/.*"tensor_bytes": *([0-9]+).*/\1/p' "$folder/quantize_report.json")
  awk -v group="$group" -v rule="$rule" -v embedding="$embedding" -v density="$(report stored_density)" \
    -v bytes="$(report bytes)" -v weights="$(report weights)" -v error="$(report relative_error)" \
    -v tensors="$tensor_bytes" -v value="$value" -v base="$base" -v without="$without" 'BEGIN {
      won = (without != "" && value != without) ? sprintf("%.0f%%", 100 * (without - value) / (without - base)) : "-"
      printf "| %s | %s | %s | %.2f%% | %.2f | %.2f | %.4f | %.4f | +%.2f%% | %s |\n", group,
        (density > 0 ? rule : "none"), embedding, 100 * density, 8 * bytes / weights, tensors / 1e6,
        error, value, 100 * (value / base - 1), won }'
done
