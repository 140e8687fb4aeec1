// Launcher of the kernel for many rows: checks the parameters, describes x to the copy engine,
// picks the instance and launches.
#include <cudaTypedefs.h>

#include <algorithm>

#include "kernels/cuda/launchers.h"
#include "kernels/cuda/linear_w4a16/many_rows_args.h"
#include "kernels/cuda/linear_w4a16/many_rows_instances.h"
#include "kernels/cuda/linear_w4a16/operand_checks.h"

namespace flashquant::cuda {
namespace {

const void* SelectKernel(int tile_rows, const PackedLayout& layout) {
  switch (tile_rows) {
    case 32:
      return ManyRowsKernelM32(layout.groups_per_chunk, layout.has_zeros);
    case 64:
      return ManyRowsKernelM64(layout.groups_per_chunk, layout.has_zeros);
    case 96:
      return ManyRowsKernelM96(layout.groups_per_chunk, layout.has_zeros);
    default:
      return ManyRowsKernelM128(layout.groups_per_chunk, layout.has_zeros);
  }
}

// The driver's function, so that nothing links against the driver. nullptr without one.
PFN_cuTensorMapEncodeTiled_v12000 TensorMapEncoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function) : nullptr;
  }();
  return encoder;
}

cudaError_t DescribeX(const LinearW4A16Params& p, int tile_rows, CUtensorMap* map) {
  const auto encode = TensorMapEncoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(p.layout.k), static_cast<cuuint64_t>(p.m)};
  const cuuint64_t row_bytes[] = {static_cast<cuuint64_t>(p.x_stride) * sizeof(__nv_bfloat16)};
  const cuuint32_t box[] = {kHalfFeatures, static_cast<cuuint32_t>(tile_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(p.x), sizes, row_bytes,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t GetDeviceAttribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(value, attribute, device);
}

// All but x and shared memory.
ManyRowsArgs CommonArgs(const LinearW4A16Params& p, int tile_rows, int num_blocks) {
  ManyRowsArgs args = {};
  args.y = static_cast<__nv_bfloat16*>(p.y);
  args.y_stride = p.y_stride;
  args.m = p.m;
  args.n = p.layout.n;
  args.num_strips = p.layout.num_strips;
  args.num_units = p.layout.num_units;
  args.row_tiles = (p.m + tile_rows - 1) / tile_rows;
  args.units = EvenSplit(ManyRowsTiles(p.layout, p.m) * p.layout.num_units, num_blocks);
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

cudaError_t Launch(const void* kernel, ManyRowsArgs args, int num_blocks, bool programmatic,
                   cudaStream_t stream) {
  const auto shared_bytes = static_cast<int>(args.shared.num_bytes);
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(kManyRowsThreads);
  config.dynamicSmemBytes = args.shared.num_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  void* arguments[] = {&args};
  if (cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments); error != cudaSuccess) {
    return error;
  }
  return cudaGetLastError();
}

}  // namespace

bool HasLinearManyRows() {
  int major = 0;
  int minor = 0;
  return GetDeviceAttribute(cudaDevAttrComputeCapabilityMajor, &major) == cudaSuccess &&
         GetDeviceAttribute(cudaDevAttrComputeCapabilityMinor, &minor) == cudaSuccess &&
         major == 9 && minor == 0 && TensorMapEncoder() != nullptr;
}

int64_t LinearManyRowsWorkspaceBytes(int32_t m, int32_t num_sms) {
  return ManyRowsWorkspaceFloats(m, num_sms) * int64_t{sizeof(float)};
}

int64_t LinearManyRowsCounters(const PackedLayout& layout, int32_t m) {
  return ManyRowsCounters(layout, m);
}

cudaError_t LaunchLinearManyRows(const LinearW4A16Params& p, cudaStream_t stream) {
  if (!HasValidOperands(p)) return cudaErrorInvalidValue;
  if (!HasLinearManyRows()) return cudaErrorNotSupported;
  const int tile_rows = ManyRowsTileRows(p.m);
  const void* kernel = SelectKernel(tile_rows, p.layout);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  int num_sms = 0;
  int shared_bytes = 0;
  if (cudaError_t error = GetDeviceAttribute(cudaDevAttrMultiProcessorCount, &num_sms);
      error != cudaSuccess) {
    return error;
  }
  if (cudaError_t error =
          GetDeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  const int num_blocks = std::min(num_sms, ManyRowsTiles(p.layout, p.m) * p.layout.num_units);
  ManyRowsArgs args = CommonArgs(p, tile_rows, num_blocks);
  // The kernel has a word of its own besides.
  args.shared = LayOutManyRows(p.layout, tile_rows, shared_bytes - 16);
  if (args.shared.raw_stages == 0) return cudaErrorInvalidConfiguration;
  if (cudaError_t error = DescribeX(p, tile_rows, &args.x); error != cudaSuccess) return error;
  return Launch(kernel, args, num_blocks, p.programmatic_launch, stream);
}

}  // namespace flashquant::cuda
