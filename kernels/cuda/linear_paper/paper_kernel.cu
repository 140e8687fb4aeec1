// See paper_launch.h: checks, shared memory, and the choice of the instance.
#include <algorithm>

#include "kernels/cuda/linear_paper/paper_kernel.cuh"
#include "kernels/cuda/linear_paper/paper_launch.h"

namespace flashquant::cuda {
namespace {

constexpr int kRowsPerPass = 32;
constexpr int kMaxStagedRecords = 512;  // of a tile

int BatchBlocksOf(int m) { return m <= 8 ? 1 : m <= 16 ? 2 : 4; }

bool IsAligned(const void* pointer, uintptr_t bytes) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

bool IsValid(const PaperLinearParams& p) {
  const PaperLayout& layout = p.layout;
  return p.m >= 1 && layout.k >= 8 && layout.k % 8 == 0 && layout.n >= 8 &&
         p.x_stride >= layout.k && p.x_stride % 8 == 0 && p.y_stride >= layout.n &&
         p.num_blocks >= 1 && IsAligned(p.x, 16) && IsAligned(p.y, 2) && IsAligned(p.weight, 16) &&
         IsAligned(p.workspace, 16) && IsAligned(p.counters, 4);
}

const void* SelectKernel(int batch_blocks, bool zeros) {
  switch (batch_blocks) {
    case 1:
      return zeros ? reinterpret_cast<const void*>(&PaperLinearKernel<1, true>)
                   : reinterpret_cast<const void*>(&PaperLinearKernel<1, false>);
    case 2:
      return zeros ? reinterpret_cast<const void*>(&PaperLinearKernel<2, true>)
                   : reinterpret_cast<const void*>(&PaperLinearKernel<2, false>);
    default:
      return zeros ? reinterpret_cast<const void*>(&PaperLinearKernel<4, true>)
                   : reinterpret_cast<const void*>(&PaperLinearKernel<4, false>);
  }
}

PaperKernelArgs ArgsOf(const PaperLinearParams& p) {
  const PaperLayout& layout = p.layout;
  PaperKernelArgs args = {};
  args.x_stride = p.x_stride;
  args.y_stride = p.y_stride;
  args.k = layout.k;
  args.n = layout.n;
  args.tiles_k = layout.tiles_k;
  const int tiles = layout.tiles_k * layout.tiles_n;
  args.tiles = EvenSplit(tiles, std::min(p.num_blocks, tiles));
  args.dense = p.weight;
  if (layout.max_records > 0) {
    args.indptr = reinterpret_cast<const uint32_t*>(p.weight + layout.indptr_offset);
    args.buckets_per_tile = layout.buckets_per_tile;
  }
  args.buckets = p.weight + layout.buckets_offset;
  args.records = p.weight + layout.records_offset;
  args.tile_dense_bytes = layout.tile_dense_bytes;
  args.groups_per_tile = layout.groups_per_tile;
  args.staged_records = std::min(layout.max_records, kMaxStagedRecords);
  args.extra_warps = p.extra_warps && layout.max_records > 0;
  args.workspace = p.workspace;
  args.counters = p.counters;
  return args;
}

// Fills in the stages, with fewer staged records where two stages would not fit otherwise; returns
// the bytes of shared memory, 0 when even so they do not.
int FitStages(const PaperLayout& layout, int batch_blocks, int limit, PaperKernelArgs* args) {
  args->dense_offset = batch_blocks * 8 * kPaperXRowBytes;
  args->buckets_offset = args->dense_offset + args->tile_dense_bytes;
  args->records_offset = args->buckets_offset + (args->buckets_per_tile * 4 + 15) / 16 * 16;
  const int sums = batch_blocks * kPaperTileN * 8 * 4;
  const int records_fit = ((limit - sums) / 2 - args->records_offset) / 16;
  if (records_fit < 0) return 0;
  args->staged_records = std::min(args->staged_records, records_fit);
  args->all_staged = args->staged_records == layout.max_records;
  args->stage_bytes = args->records_offset + args->staged_records * 16;
  args->stages = std::min(kPaperMaxStages, (limit - sums) / args->stage_bytes);
  return args->stages < 2 ? 0 : sums + args->stages * args->stage_bytes;
}

cudaError_t SharedLimit(const PaperLinearParams& p, int* limit) {
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  // The static part of the kernel's shared memory counts too.
  constexpr int kStaticBytes = 128;
  if (cudaError_t error =
          cudaDeviceGetAttribute(limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      error != cudaSuccess) {
    return error;
  }
  if (p.shared_bytes_limit > 0) *limit = std::min(*limit, p.shared_bytes_limit);
  *limit -= kStaticBytes;
  return cudaSuccess;
}

cudaError_t LaunchPass(const PaperLinearParams& p, PaperKernelArgs args, int limit,
                       cudaStream_t stream) {
  const int batch_blocks = BatchBlocksOf(args.m);
  const void* kernel = SelectKernel(batch_blocks, p.layout.has_zeros);
  const int shared_bytes = FitStages(p.layout, batch_blocks, limit, &args);
  if (shared_bytes == 0) return cudaErrorInvalidConfiguration;
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  const int tiles = p.layout.tiles_k * p.layout.tiles_n;
  const auto blocks = static_cast<unsigned>(std::min(p.num_blocks, tiles));
  const int warps = kPaperDenseWarps + (args.extra_warps ? kPaperSparseWarps : 0);
  void* arguments[] = {&args};
  if (cudaError_t error =
          cudaLaunchKernel(kernel, dim3(blocks), dim3(static_cast<unsigned>(warps) * 32), arguments,
                           static_cast<size_t>(shared_bytes), stream);
      error != cudaSuccess) {
    return error;
  }
  return cudaGetLastError();
}

}  // namespace

int64_t PaperWorkspaceBytes(int32_t num_blocks, int32_t m) {
  return int64_t{2} * num_blocks * BatchBlocksOf(m) * kPaperTileN * 8 * int64_t{sizeof(float)};
}

cudaError_t LaunchPaperLinear(const PaperLinearParams& p, cudaStream_t stream) {
  if (!IsValid(p)) return cudaErrorInvalidValue;
  int limit = 0;
  if (cudaError_t error = SharedLimit(p, &limit); error != cudaSuccess) return error;
  PaperKernelArgs args = ArgsOf(p);
  for (int32_t row = 0; row < p.m; row += kRowsPerPass) {
    args.m = std::min(p.m - row, kRowsPerPass);
    args.x = static_cast<const __nv_bfloat16*>(p.x) + row * p.x_stride;
    args.y = static_cast<__nv_bfloat16*>(p.y) + row * p.y_stride;
    if (cudaError_t error = LaunchPass(p, args, limit, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace flashquant::cuda
