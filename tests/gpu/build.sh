#!/usr/bin/env bash
# Builds the stand-alone GPU test programs with nvcc alone:  tests/gpu/build.sh DIR
# FQ_GPU_ARCHS: compute capabilities, default "90". One compiler process per source file, as many at
# a time as there are cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="$1"
mkdir -p "$out"
nvcc="${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}"
flags=(-std=c++20 -O3 -I. -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas)
read -r -a extra <<<"${FQ_NVCC_FLAGS:-}"
flags+=("${extra[@]}")
for arch in ${FQ_GPU_ARCHS:-90}; do
  flags+=("-gencode=arch=compute_${arch},code=sm_${arch}")
done

common=(kernels/cuda/linear_w4a16/{pack,plan,shared_layout}.cc kernels/cuda/linear_w4a16/{launch,pack_device}.cu
  kernels/cuda/linear_w4a16/instance_m{8,16,32}_{bulk,cp_async}.cu kernels/bench/linear_problem.cc)
programs=(tests/gpu/linear_w4a16_test.cu tests/gpu/pack_device_test.cu tests/gpu/linear_w4a16_bench.cu tests/gpu/cublas_baseline.cc)

object() { echo "$out/$(basename "${1%.*}").o"; }
printf '%s\n' "${common[@]}" "${programs[@]}" |
  xargs -P "${FQ_JOBS:-$(nproc)}" -I{} bash -c \
    'file="$1"; shift; out="$1"; shift; nvcc="$1"; shift
     object="$out/$(basename "${file%.*}").o"
     if [[ -n "$(find kernels/bench kernels/cuda tests/gpu -newer "$object" -name "*.*" 2>/dev/null | grep -E "\.(h|cuh)$")" ||
           ! -f "$object" || "$file" -nt "$object" ]]; then
       "$nvcc" "$@" -c "$file" -o "$object"
     fi' _ {} "$out" "$nvcc" "${flags[@]}"

objects=()
for file in "${common[@]}"; do objects+=("$(object "$file")"); done
"$nvcc" "${objects[@]}" "$out/linear_w4a16_test.o" -o "$out/linear_w4a16_test"
"$nvcc" "${objects[@]}" "$out/pack_device_test.o" -o "$out/pack_device_test"
"$nvcc" "${objects[@]}" "$out/linear_w4a16_bench.o" "$out/cublas_baseline.o" -ldl \
  -o "$out/linear_w4a16_bench"
