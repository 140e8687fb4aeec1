// In place of many_rows_launch.cu in builds without code for compute capability 9.0.
#include "kernels/cuda/launchers.h"

namespace flashquant::cuda {

bool HasLinearManyRows() { return false; }

int64_t LinearManyRowsWorkspaceBytes(int32_t /*m*/, int32_t /*num_sms*/) { return 0; }

int64_t LinearManyRowsCounters(const PackedLayout& /*layout*/, int32_t /*m*/) { return 0; }

cudaError_t LaunchLinearManyRows(const LinearW4A16Params& /*params*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

}  // namespace flashquant::cuda
