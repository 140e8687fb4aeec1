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
export gencode=""
for arch in ${FQ_GPU_ARCHS:-90}; do
  gencode+=" -gencode=arch=compute_${arch},code=sm_${arch}"
done

kernel=(kernels/cuda/linear_w4a16/{many_rows_plan,pack,plan,shared_layout,tuned_plans}.cc
  kernels/cuda/linear_w4a16/{launch,pack_device}.cu kernels/cuda/linear_w4a16/instance_m{8,16,32}_{bulk,cp_async}.cu)
# Needs what only code for 9.0 alone has.
many_rows=(kernels/cuda/linear_w4a16/many_rows_none.cu)
if [[ " ${FQ_GPU_ARCHS:-90} " == *" 90 "* ]]; then
  many_rows=(kernels/cuda/linear_w4a16/many_rows_{launch,m32,m64,m96,m128}.cu)
fi
bench=(kernels/bench/{csr_matrix,cublas_baseline,cusparse_baseline,kernel_bench,linear_problem,slot_order}.cc
  kernels/bench/route_bench.cc kernels/bench/{graph_timer,kernel_bench,paper_bench,route_bench}.cu)
unpack=(kernels/cuda/backend/{linear_route,unpack_tables}.cc kernels/cuda/backend/unpack_weight.cu)
paper=(kernels/cuda/linear_paper/paper_pack.cc kernels/cuda/linear_paper/paper_kernel.cu)
programs=(tests/gpu/{linear_w4a16_test,linear_many_rows_test,linear_paper_test,unpack_weight_test,pack_device_test,linear_w4a16_bench}.cu)

# Objects are built again when their source or a header that they may include is newer.
object() { echo "$out/$(basename "$1").o"; }
printf '%s\n' "${kernel[@]}" "${many_rows[@]}" "${bench[@]}" "${paper[@]}" "${unpack[@]}" "${programs[@]}" |
  xargs -P "${FQ_JOBS:-$(nproc)}" -I{} bash -c \
    'file="$1"; shift; out="$1"; shift; nvcc="$1"; shift
     object="$out/$(basename "$file").o"
     folders=(kernels/cuda)
     if [[ "$file" != kernels/cuda/* ]]; then folders+=(kernels/bench tests/gpu); fi
     if [[ -n "$(find "${folders[@]}" -newer "$object" -name "*.*" 2>/dev/null | grep -E "\.(h|cuh)$")" ||
           ! -f "$object" || "$file" -nt "$object" ]]; then
       if [[ "$file" == */many_rows_*.cu ]]; then gencode="-gencode=arch=compute_90a,code=sm_90a"; fi
       "$nvcc" "$@" $gencode -c "$file" -o "$object"
     fi' _ {} "$out" "$nvcc" "${flags[@]}"

link() {
  local program="$1" objects=()
  shift
  for file in "$@" "tests/gpu/$program.cu"; do objects+=("$(object "$file")"); done
  "$nvcc" "${objects[@]}" -ldl -o "$out/$program"
}
link linear_w4a16_test "${kernel[@]}" kernels/bench/linear_problem.cc
link linear_many_rows_test "${kernel[@]}" "${many_rows[@]}" kernels/bench/linear_problem.cc
link linear_paper_test "${kernel[@]}" "${paper[@]}" kernels/bench/linear_problem.cc
link unpack_weight_test "${kernel[@]}" "${unpack[@]}" kernels/bench/linear_problem.cc
link pack_device_test "${kernel[@]}" kernels/bench/linear_problem.cc
link linear_w4a16_bench "${kernel[@]}" "${many_rows[@]}" "${bench[@]}" "${paper[@]}" "${unpack[@]}"
