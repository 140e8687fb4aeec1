#!/usr/bin/env bash
# Checks, without a GPU, what the compiler says about every instance of the fused linear kernel:
#   tests/gpu/check_resources.sh DIR [ARCH...]      default: 80 86 89 90 120
# Fails when an instance spills more than its limit, has local arrays beyond that, or needs more
# registers than its block size leaves. Shared memory is chosen by the launcher from the device's
# limit, so there is nothing static to check. DIR receives objects and reports.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="$1"
shift
archs=("$@")
if [[ ${#archs[@]} -eq 0 ]]; then archs=(80 86 89 90 120); fi
mkdir -p "$out"
rm -f "$out"/*.report
nvcc="${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}"
# A few words outside the main loop; more would be in it. At 32 rows, where a thread needs all its
# registers, some are there: known, and the next thing to mend.
kMaxSpillBytes=16
kMaxSpillBytesAt32Rows=64
kMaxSpillBytesOfManyRows=24  # at a tile's end
kRegisters=65536

jobs=()
expected=0
for arch in "${archs[@]}"; do
  for file in kernels/cuda/linear_w4a16/instance_*.cu; do jobs+=("$arch $file"); done
  expected=$((expected + 54))
  if [[ "$arch" == 90 ]]; then
    for file in kernels/cuda/linear_w4a16/many_rows_m*.cu; do jobs+=("90a $file"); done
    expected=$((expected + 24))
  fi
done
printf '%s\n' "${jobs[@]}" | xargs -P "${FQ_JOBS:-$(nproc)}" -L1 bash -c '
  name="$2/$(basename "${4%.cu}")_sm$3"
  "$1" -std=c++20 -O3 -I. -gencode="arch=compute_$3,code=sm_$3" -Xptxas -v -c "$4" -o "$name.o" \
    >"$name.report" 2>&1 || { cat "$name.report"; exit 255; }' _ "$nvcc" "$out"

failed=0
instances=0
for report in "$out"/*_sm*.report; do
  threads=384
  if [[ "$report" == */many_rows_* ]]; then threads=640; fi
  most=$kMaxSpillBytes
  if [[ "$report" == */instance_m32_* ]]; then most=$kMaxSpillBytesAt32Rows; fi
  if [[ "$report" == */many_rows_* ]]; then most=$kMaxSpillBytesOfManyRows; fi
  while read -r stack registers; do
    instances=$((instances + 1))
    if ((stack > most || registers * threads > kRegisters)); then
      echo "$(basename "$report" .report): stack $stack bytes, $registers registers x $threads threads"
      failed=1
    fi
  done < <(awk '/bytes stack frame/ { stack = $1 }
                /Used [0-9]+ registers/ { for (i = 1; i < NF; ++i) if ($i == "Used") print stack, $(i + 1) }' "$report")
done
echo "$instances kernel instances checked for ${archs[*]}"
if ((instances != expected)); then
  echo "expected $expected: did the compiler's report change?"
  failed=1
fi
exit "$failed"
