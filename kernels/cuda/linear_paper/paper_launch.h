// Launcher of the paper's own mapping (strategy 1a): one kernel in which tensor cores multiply a
// tile's codes and CUDA cores its outliers, eight lanes for the eight rows of a bucket, both into
// one output tile. For benchmarks and ablations (the paper's figure 11); servers use launchers.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/linear_paper/paper_format.h"

namespace flashquant::cuda {

// y = x * W. The same limits on x, y, their strides, k and n as LinearW4A16Params.
struct PaperLinearParams {
  const void* x = nullptr;  // [m, k] BF16
  void* y = nullptr;        // [m, n] BF16
  int64_t x_stride = 0;
  int64_t y_stride = 0;
  int32_t m = 0;  // more than 32 run in passes

  PaperLayout layout;
  const uint8_t* weight = nullptr;  // layout.num_bytes in device memory, 16-byte aligned
  int32_t num_blocks = 0;           // normally one per SM
  bool extra_warps = true;          // for outliers; false: the dense warps do them too

  // Private to one stream: PaperWorkspaceBytes of partial sums, and counters [tiles_n] which must
  // be zero before the first launch and are left zero.
  float* workspace = nullptr;
  uint32_t* counters = nullptr;

  int32_t shared_bytes_limit = 0;  // 0: what the device allows a block
};

int64_t PaperWorkspaceBytes(int32_t num_blocks, int32_t m);

// Queues the kernel. cudaErrorInvalidValue for sizes, strides, pointers or alignments outside the
// limits; cudaErrorInvalidConfiguration when two stages do not fit in shared memory. Deterministic.
cudaError_t LaunchPaperLinear(const PaperLinearParams& params, cudaStream_t stream);

}  // namespace flashquant::cuda
