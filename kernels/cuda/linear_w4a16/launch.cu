// Launcher of the fused kernel: checks the parameters, lays out shared memory within the device's
// limit, picks the instance and launches.
#include <algorithm>

#include "kernels/cuda/launchers.h"
#include "kernels/cuda/linear_w4a16/instances.h"
#include "kernels/cuda/linear_w4a16/kernel_args.h"
#include "kernels/cuda/linear_w4a16/operand_checks.h"

namespace flashquant::cuda {
namespace {

constexpr int kMaxRowsPerPass = 32;

struct DeviceLimits {
  bool bulk = false;  // the device runs code that has bulk copies and clusters
  int shared_bytes = 0;
};

// A newer device may run code that was compiled for one without bulk copies.
cudaError_t GetDeviceLimits(DeviceLimits* limits) {
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  cudaFuncAttributes code = {};
  if (cudaError_t error = cudaFuncGetAttributes(&code, KernelM8Bulk(1, false, true));
      error != cudaSuccess) {
    return error;
  }
  limits->bulk = code.ptxVersion >= 90;
  return cudaDeviceGetAttribute(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                device);
}

bool IsValid(const LinearW4A16Params& p) {
  const PackedLayout& layout = p.layout;
  const LinearPlan& plan = p.plan;
  const bool planned = plan.num_splits >= 1 && plan.num_splits <= layout.num_strips &&
                       plan.num_ranks >= 1 && plan.num_ranks <= layout.num_units &&
                       plan.num_warps >= 1 && plan.num_warps <= kMaxWarpsPerBlock &&
                       (!plan.cluster_join || plan.num_ranks <= kMaxClusterRanks);
  return HasValidOperands(p) && planned && CanNumberUnits(layout, plan);
}

const void* SelectKernel(int batch_blocks, const PackedLayout& layout, bool bulk,
                         bool cluster_join) {
  switch (batch_blocks) {
    case 1:
      return bulk ? KernelM8Bulk(layout.groups_per_chunk, layout.has_zeros, cluster_join)
                  : KernelM8CpAsync(layout.groups_per_chunk, layout.has_zeros);
    case 2:
      return bulk ? KernelM16Bulk(layout.groups_per_chunk, layout.has_zeros, cluster_join)
                  : KernelM16CpAsync(layout.groups_per_chunk, layout.has_zeros);
    case 4:
      return bulk ? KernelM32Bulk(layout.groups_per_chunk, layout.has_zeros, cluster_join)
                  : KernelM32CpAsync(layout.groups_per_chunk, layout.has_zeros);
    default:
      return nullptr;
  }
}

// Fills in the layout; returns the bytes of shared memory, 0 when they do not fit.
uint32_t FitShared(const LinearW4A16Params& p, const LinearPlan& plan, int batch_blocks, int limit,
                   KernelArgs* args) {
  args->shared = LayOutShared(p.layout, plan, batch_blocks);
  args->stage_bytes = StageBytes(p.layout);
  const uint32_t ring_stage = static_cast<uint32_t>(plan.num_warps) * args->stage_bytes;
  const int64_t left = int64_t{limit} - args->shared.ring_offset;
  if (left < ring_stage) return 0;
  args->stages = static_cast<int>(std::min<int64_t>(kMaxStages, left / ring_stage));
  // Without clusters a warp leaves its last sums in its own part of the ring.
  static_assert(kUnitChunks * ChunkDenseBytes(1, false) >= static_cast<int>(SlotBytes(4)));
  return args->shared.ring_offset + static_cast<uint32_t>(args->stages) * ring_stage;
}

cudaError_t LaunchPass(const LinearW4A16Params& p, KernelArgs args, bool bulk, int limit,
                       cudaStream_t stream) {
  const int batch_blocks = BatchBlocks(args.m);
  const void* kernel = SelectKernel(batch_blocks, p.layout, bulk, args.cluster_join);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  LinearPlan plan = p.plan;
  plan.cluster_join = args.cluster_join;
  const uint32_t shared_bytes = FitShared(p, plan, batch_blocks, limit, &args);
  if (shared_bytes == 0) return cudaErrorInvalidConfiguration;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(shared_bytes));
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(plan.num_ranks), static_cast<unsigned>(plan.num_splits));
  config.blockDim = dim3(static_cast<unsigned>(plan.num_warps) * 32);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (p.programmatic_launch && bulk) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (args.cluster_join) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(plan.num_ranks), 1, 1};
  }
  void* arguments[] = {&args};
  if (cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments); error != cudaSuccess) {
    return error;
  }
  return cudaGetLastError();
}

KernelArgs CommonArgs(const LinearW4A16Params& p) {
  KernelArgs args = {};
  args.x_stride = p.x_stride;
  args.y_stride = p.y_stride;
  args.k = p.layout.k;
  args.n = p.layout.n;
  args.num_units = p.layout.num_units;
  args.strips = EvenSplit(p.layout.num_strips, p.plan.num_splits);
  args.units = EvenSplit(p.layout.num_units, p.plan.num_ranks);
  for (int more_strips = 0; more_strips < 2; ++more_strips) {
    for (int more_units = 0; more_units < 2; ++more_units) {
      args.runs[more_strips][more_units] = CutRuns(
          args.strips.quotient + more_strips, args.units.quotient + more_units, p.plan.num_warps);
    }
  }
  const JoinSlots slots = ChooseJoinSlots(p.layout, p.plan);
  args.join_slots = slots.count;
  args.join_lag = slots.lag;
  args.join_parts = slots.parts;
  args.join_groups = JoinGroups(p.plan.num_ranks);
  for (int r = 0; r <= std::min(p.plan.num_ranks, kMaxClusterRanks); ++r) {
    args.join_first[r] = static_cast<uint8_t>((8 * r + p.plan.num_ranks - 1) / p.plan.num_ranks);
  }
  args.num_ranks = p.plan.num_ranks;
  args.num_warps = p.plan.num_warps;
  args.dense = p.weight;
  if (p.layout.max_outlier_bytes > 0) {
    args.outlier_index = reinterpret_cast<const OutlierRef*>(p.weight + p.layout.index_offset);
  }
  args.outliers = p.weight + p.layout.outliers_offset;
  args.unit_dense_bytes = static_cast<uint32_t>(p.layout.unit_dense_bytes);
  args.workspace = p.workspace;
  args.counters = p.counters;
  return args;
}

cudaError_t QueryMaxClusters(DeviceShape* shape) {
  const void* kernel = KernelM8Bulk(1, false, true);
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               shape->shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  for (int ranks = 2; ranks <= kMaxClusterRanks; ++ranks) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(ranks * shape->num_sms));
    config.blockDim = dim3(kMaxWarpsPerBlock * 32);
    config.dynamicSmemBytes = static_cast<size_t>(shape->shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaError_t error = cudaOccupancyMaxActiveClusters(
            &shape->max_clusters[static_cast<size_t>(ranks)], kernel, &config);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t QueryDeviceShape(DeviceShape* shape) {
  DeviceLimits limits;
  if (cudaError_t error = GetDeviceLimits(&limits); error != cudaSuccess) return error;
  *shape = DeviceShape();
  shape->shared_bytes = limits.shared_bytes;
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&shape->num_sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  int major = 0;
  if (cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      error != cudaSuccess) {
    return error;
  }
  // Later consumer devices launch clusters too, but have no groups of SMs to gain from.
  return major == 9 && limits.bulk ? QueryMaxClusters(shape) : cudaSuccess;
}

int64_t LinearW4A16WorkspaceBytes(const PackedLayout& layout, const LinearPlan& plan, int32_t m) {
  if (plan.cluster_join || plan.num_ranks == 1) return 0;
  return int64_t{layout.num_strips} * plan.num_ranks *
         SlotBytes(BatchBlocks(std::min(m, kMaxRowsPerPass)));
}

cudaError_t LaunchLinearW4A16(const LinearW4A16Params& p, cudaStream_t stream) {
  if (!IsValid(p)) return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (cudaError_t error = GetDeviceLimits(&limits); error != cudaSuccess) return error;
  const bool bulk = p.path != CopyPath::kCpAsync && limits.bulk;
  if (p.path == CopyPath::kBulk && !bulk) return cudaErrorInvalidValue;
  if (p.plan.cluster_join && !bulk) return cudaErrorInvalidValue;
  const int limit = p.shared_bytes_limit > 0 ? std::min(p.shared_bytes_limit, limits.shared_bytes)
                                             : limits.shared_bytes;
  const int rows_per_pass = std::clamp(p.rows_per_pass, 1, kMaxRowsPerPass);
  KernelArgs args = CommonArgs(p);
  args.cluster_join = p.plan.cluster_join && p.plan.num_ranks > 1;
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
