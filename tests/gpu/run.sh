#!/usr/bin/env bash
# GPU checks and timings in one command:  tests/gpu/run.sh kernels|engine|serve|quantize [--prebuilt DIR] [options]
#   kernels   builds (nvcc only), checks the fused linear kernel against FP64, runs compute-sanitizer
#             on small odd shapes, times against cuBLAS and a streaming read; one table last
#   engine    the whole CUDA backend: engine.sh
#   serve     an 8B model's shapes loaded and served: serve.sh
#   quantize  the quantizer, and an 8B model's shapes quantized: quantize.sh
# --prebuilt DIR: uses the programs in DIR instead of building. FQ_GPU_ARCHS: default "90".
# Exit code 0 only when every check passed. Logs go to the build folder.
set -euo pipefail
cd "$(dirname "$0")/../.."

part="${1:-kernels}"
shift || true
if [[ "$part" == engine ]]; then exec tests/gpu/engine.sh "$@"; fi
if [[ "$part" == serve ]]; then exec tests/gpu/serve.sh "$@"; fi
if [[ "$part" == quantize ]]; then exec tests/gpu/quantize.sh "$@"; fi
prebuilt=""
if [[ "${1:-}" == "--prebuilt" ]]; then
  prebuilt="$2"
  shift 2
fi
if [[ "$part" != kernels ]]; then
  echo "usage: tests/gpu/run.sh kernels|engine|serve|quantize [--prebuilt DIR] [options]" >&2
  exit 2
fi

build="${prebuilt:-build/gpu}"
if [[ -z "$prebuilt" ]]; then
  tests/gpu/build.sh "$build"
fi

failed=0
"$build/pack_device_test" || failed=1
"$build/linear_w4a16_test" || failed=1
"$build/linear_many_rows_test" || failed=1
"$build/linear_paper_test" || failed=1
"$build/unpack_weight_test" || failed=1
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    echo "compute-sanitizer $tool"
    for program in pack_device_test linear_w4a16_test linear_many_rows_test linear_paper_test unpack_weight_test; do
      compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/$program" --quick \
        >"$build/$tool.$program.log" 2>&1 || failed=1
      tail -n 3 "$build/$tool.$program.log"
    done
  done
else
  echo "compute-sanitizer not found: memcheck and racecheck not run"
fi
"$build/linear_w4a16_bench" "$@" || failed=1
if [[ "$failed" != 0 ]]; then echo "FAILED"; fi
exit "$failed"
