#!/usr/bin/env bash
# Quality of quantized checkpoints as a Markdown table: bytes, relative output error on the calibration
# text, perplexity of another text with the 95% interval of its distance to BF16's (window by window),
# KL divergence and top-1 agreement. Not part of the test run (many minutes); its output is in
# README.md beside this and deploy/demo-model/README.md.
#
# Usage: tests/quality/quality_table.sh [-b FLASHQUANT] [-m MODEL_DIR] [-t TEXT] [-w WINDOWS] [-c CONTEXT]
#                                       [-C CALIBRATION] [-s SKIP] [-n TOKENS] [-o WORK_DIR] [CONFIG ...]
# A CONFIG is "METHOD:GROUP:OUTLIERS[:EMBEDDING[:RULE]]", for example spqr:128:0.03, rtn:64:0.02:int8 or
# spqr:128:t0.1; OUTLIERS is a density or, after a t, SpQR's threshold, or, after an =, an earlier CONFIG
# (with - for :, as in spqr:128:=gptq-64-0) whose bytes are the target size. MODEL_DIR must be an unquantized
# checkpoint with a tokenizer. CALIBRATION is used from token SKIP on, which by default is where the
# default TEXT is no longer scored. Folders that are in WORK_DIR already are not made again.
set -euo pipefail
cd "$(dirname "$0")/../.."

data="${FQ_TEST_DATA:-../shared}"
binary=build/cpu/flashquant
model="$data/models/story-22m"
text="" calibration="" work=""
windows=240 context=512 skip=122880 tokens=0
while getopts "b:m:t:w:c:C:s:n:o:" option; do
  case "$option" in
    b) binary=$OPTARG ;;
    m) model=$OPTARG ;;
    t) text=$OPTARG ;;
    w) windows=$OPTARG ;;
    c) context=$OPTARG ;;
    C) calibration=$OPTARG ;;
    s) skip=$OPTARG ;;
    n) tokens=$OPTARG ;;
    o) work=$OPTARG ;;
    *) exit 64 ;;
  esac
done
shift $((OPTIND - 1))
text="${text:-$model/heldout.txt}"
calibration="${calibration:-$model/heldout.txt}"
configs=("$@")
if [[ ${#configs[@]} -eq 0 ]]; then
  configs=(rtn:128:0 gptq:128:0 gptq:64:0 gptq:32:0 rtn:128:0.01 rtn:128:0.015 rtn:128:0.02 rtn:128:0.03
    spqr:128:=gptq-64-0 spqr:128:=gptq-32-0 spqr:128:0.005 spqr:128:0.01 spqr:128:0.015 spqr:128:0.02 spqr:128:0.03 spqr:64:0.03 spqr:32:0.03
    spqr:128:t0.05 spqr:128:t0.1 spqr:128:t0.15 spqr:128:t0.2)
fi
[[ -x "$binary" ]] || { echo "no program at $binary; give it with -b" >&2; exit 66; }
for file in "$text" "$calibration"; do
  [[ -r "$file" ]] || { echo "no text at $file; give it with -t and -C" >&2; exit 66; }
done
if [[ -z "$work" ]]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi

folders=()
for config in "${configs[@]}"; do
  IFS=: read -r method group outliers embedding rule <<<"$config"
  folder="$work/${config//:/-}"
  folders+=("$folder")
  [[ -f "$folder/config.json" ]] && continue
  flags=(--method "$method" --group-size "$group" --embedding "${embedding:-bf16}" --outliers "${rule:-rescale}")
  if [[ "$outliers" == t* ]]; then
    flags+=(--threshold "${outliers#t}")
  elif [[ "$outliers" == =* ]]; then
    flags+=(--target-size "$(sed -nE 's/.*"tensor_bytes": *([0-9]+).*/\1/p' "$work/${outliers#=}/quantize_report.json")")
  elif [[ "$method" != gptq ]]; then
    flags+=(--density "$outliers")
  fi
  "$binary" quantize --input "$model" --output "$folder" "${flags[@]}" --calibration "$calibration" \
    --calibration-skip "$skip" --calibration-tokens "$tokens" --quiet >/dev/null
done

# A number at a key of a report's total.
report() {
  tr -d '\n' <"$1/quantize_report.json" |
    sed -E "s/.*\"total\": *\{([^}]*)\}.*/\1/; s/.*\"$2\": *([-0-9.e]+).*/\1/"
}

echo "| weights | group | stored outliers | bits a weight | tensors MB | output error | perplexity | over BF16 | 95% interval | KL, nats | top-1 |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
row=-3
"$binary" compare "$model" "${folders[@]}" --text "$text" --context "$context" --max-windows "$windows" |
  while read -r perplexity over low dots high divergence top path; do
    row=$((row + 1))
    if ((row < 0)); then continue; fi
    if ((row == 0)); then
      echo "| BF16 | - | - | 16 | - | 0 | $perplexity | - | - | - | - |"
      continue
    fi
    IFS=: read -r method group outliers embedding rule <<<"${configs[$((row - 1))]}"
    folder="${folders[$((row - 1))]}"
    [[ "$path" == "$folder" ]] || { echo "unexpected line for $path" >&2; exit 70; }
    name=$method
    if [[ "$method" == rtn && "$outliers" != 0 ]]; then name="rtn + outliers"; fi
    if [[ "$method" == spqr ]]; then name="gptq + outliers"; fi
    if [[ "$outliers" == t* ]]; then name+=", threshold ${outliers#t}"; fi
    if [[ "$outliers" == =* ]]; then name+=", bytes of ${outliers#=}"; fi
    if [[ -n "${rule:-}" ]]; then name+=", by $rule"; fi
    if [[ "${embedding:-bf16}" != bf16 ]]; then name+=", $embedding embedding"; fi
    tensor_bytes=$(sed -nE 's/.*"tensor_bytes": *([0-9]+).*/\1/p' "$folder/quantize_report.json")
    awk -v name="$name" -v group="$group" -v density="$(report "$folder" stored_density)" \
      -v bytes="$(report "$folder" bytes)" -v weights="$(report "$folder" weights)" \
      -v error="$(report "$folder" relative_output_error)" -v tensors="$tensor_bytes" \
      -v perplexity="$perplexity" -v over="$over" -v low="$low" -v high="$high" \
      -v divergence="$divergence" -v top="$top" 'BEGIN {
        printf "| %s | %s | %s | %.2f | %.2f | %.4f | %.4f | %+.2f%% | %+.2f%% to %+.2f%% | %.4f | %.2f%% |\n", name,
          group, (density > 0 ? sprintf("%.2f%%", 100 * density) : "none"), 8 * bytes / weights, tensors / 1e6, error,
          perplexity, over, low, high, divergence, top }'
  done
