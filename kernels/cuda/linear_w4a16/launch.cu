// Launcher of the fused kernel: checks the parameters, lays out shared memory within the device's
// limit, picks the instance and launches.
#include <algorithm>

#include "kernels/cuda/launchers.h"
#include "kernels/cuda/linear_w4a16/instances.h"
#include "kernels/cuda/linear_w4a16/kernel_args.h"

namespace flashquant::cuda {
namespace {

constexpr int kMaxRowsPerPass = 32;
constexpr int kMinStages = 1;
constexpr int kMaxRingStages = kPlanUnits;

struct DeviceLimits {
  int major = 0;
  int shared_bytes = 0;
};

cudaError_t GetDeviceLimits(DeviceLimits* limits) {
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&limits->major, cudaDevAttrComputeCapabilityMajor, device);
      error != cudaSuccess) {
    return error;
  }
  return cudaDeviceGetAttribute(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                device);
}

bool IsAligned(const void* pointer, uintptr_t bytes) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

bool IsValid(const LinearW4A16Params& p) {
  const bool sizes = p.m >= 1 && p.k >= 8 && p.n >= 8 && p.k % 8 == 0 && p.n % 8 == 0 &&
                     p.x_stride >= p.k && p.x_stride % 8 == 0 && p.y_stride >= p.n &&
                     p.y_stride % 2 == 0 && p.num_blocks >= 1 && p.slice_chunks >= 1 &&
                     p.num_first_slots >= 0 && p.num_first_slots <= p.num_warps &&
                     p.num_warps >= 1 && p.num_warps <= kMaxWarpsPerBlock;
  const bool record =
      p.stage_bytes >= kCodeBytes && p.stage_bytes % 16 == 0 && p.stage_bytes <= kMaxRecordBytes;
  return sizes && record && IsAligned(p.x, 16) && IsAligned(p.y, 4) && IsAligned(p.records, 16) &&
         IsAligned(p.units, 8) && IsAligned(p.warps, 64) && IsAligned(p.rows, 16) &&
         IsAligned(p.workspace, 16) && IsAligned(p.counters, 4);
}

int BatchBlocks(int m) { return m <= 8 ? 1 : m <= 16 ? 2 : 4; }

const void* SelectKernel(int batch_blocks, int groups_per_chunk, bool bulk) {
  switch (batch_blocks) {
    case 1:
      return bulk ? KernelM8Bulk(groups_per_chunk) : KernelM8CpAsync(groups_per_chunk);
    case 2:
      return bulk ? KernelM16Bulk(groups_per_chunk) : KernelM16CpAsync(groups_per_chunk);
    case 4:
      return bulk ? KernelM32Bulk(groups_per_chunk) : KernelM32CpAsync(groups_per_chunk);
    default:
      return nullptr;
  }
}

constexpr uint32_t RoundUp(uint32_t value, uint32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Returns the bytes of shared memory, 0 when they do not fit.
uint32_t LayOutShared(const LinearW4A16Params& p, int batch_blocks, int limit, KernelArgs* args) {
  const auto blocks = static_cast<uint32_t>(batch_blocks);
  const auto chunks = static_cast<uint32_t>(p.slice_chunks);
  args->sums_offset = kSharedHeadBytes;
  args->x_offset = RoundUp(args->sums_offset + chunks * static_cast<uint32_t>(p.groups_per_chunk) *
                                                   blocks * kRowsPerBatchBlock * 4,
                           128);
  args->x_block_pitch = chunks * kChunkK * kRowsPerBatchBlock * 2;
  args->first_slots_offset = args->x_offset + blocks * args->x_block_pitch;
  args->ring_offset =
      args->first_slots_offset + static_cast<uint32_t>(p.num_first_slots) * blocks * kSlotBytes<1>;
  args->stage_bytes = static_cast<uint32_t>(p.stage_bytes) + kStageTailBytes;
  const uint32_t ring_stage = static_cast<uint32_t>(p.num_warps) * args->stage_bytes;
  const int64_t left = int64_t{limit} - args->ring_offset;
  args->stages = static_cast<int>(std::min<int64_t>(kMaxRingStages, left / ring_stage));
  if (left < 0 || args->stages < kMinStages) return 0;
  // A warp leaves its last sums in its own part of the ring.
  if (args->stages * args->stage_bytes < blocks * kSlotBytes<1>) return 0;
  args->early_stages = std::clamp(p.early_stages, 0, args->stages);
  return args->ring_offset + static_cast<uint32_t>(args->stages) * ring_stage;
}

cudaError_t LaunchPass(const LinearW4A16Params& p, KernelArgs args, bool bulk, int limit,
                       cudaStream_t stream) {
  const int batch_blocks = BatchBlocks(args.m);
  const void* kernel = SelectKernel(batch_blocks, p.groups_per_chunk, bulk);
  if (kernel == nullptr || p.num_warps > MaxWarps(batch_blocks)) return cudaErrorInvalidValue;
  const uint32_t shared_bytes = LayOutShared(p, batch_blocks, limit, &args);
  if (shared_bytes == 0) return cudaErrorInvalidConfiguration;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(shared_bytes));
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(p.num_warps) * 32);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = p.programmatic_launch && bulk ? 1 : 0;
  void* arguments[] = {&args};
  if (cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments); error != cudaSuccess) {
    return error;
  }
  return cudaGetLastError();
}

}  // namespace

int64_t LinearW4A16WorkspaceBytes(int64_t num_pieces, int32_t m) {
  return num_pieces * BatchBlocks(std::min(m, kMaxRowsPerPass)) * int64_t{kSlotBytes<1>};
}

cudaError_t LaunchLinearW4A16(const LinearW4A16Params& p, cudaStream_t stream) {
  if (!IsValid(p)) return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (cudaError_t error = GetDeviceLimits(&limits); error != cudaSuccess) return error;
  const bool bulk = p.path != CopyPath::kCpAsync && limits.major >= 9;
  if (p.path == CopyPath::kBulk && !bulk) return cudaErrorInvalidValue;
  const int limit = p.shared_bytes_limit > 0 ? std::min(p.shared_bytes_limit, limits.shared_bytes)
                                             : limits.shared_bytes;
  const int rows_per_pass = std::clamp(p.rows_per_pass, 1, kMaxRowsPerPass);
  KernelArgs args = {};
  args.x_stride = p.x_stride;
  args.y_stride = p.y_stride;
  args.k = p.k;
  args.n = p.n;
  args.num_strips = (p.n + kStripN - 1) / kStripN;
  args.num_warps = p.num_warps;
  args.has_zeros = p.has_zeros;
  args.records = p.records;
  args.units = p.units;
  args.warps = p.warps;
  args.rows = p.rows;
  args.workspace = p.workspace;
  args.counters = p.counters;
  for (int32_t row = 0; row < p.m; row += rows_per_pass) {
    args.m = std::min(p.m - row, rows_per_pass);
    args.x = static_cast<const __nv_bfloat16*>(p.x) + row * p.x_stride;
    args.y = static_cast<__nv_bfloat16*>(p.y) + row * p.y_stride;
    if (cudaError_t error = LaunchPass(p, args, bulk, limit, stream); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace flashquant::cuda
