// Plain C++ declarations of the CUDA kernels' launchers: one params struct and one function per op.
// No absl here (nvcc compiles the callers' side of it too); the backend turns cudaError_t into a
// status.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

// How weights travel from global to shared memory.
enum class CopyPath : uint8_t {
  kAuto = 0,     // bulk copies where the device has them
  kBulk = 1,     // cp.async.bulk + mbarrier, needs sm_90
  kCpAsync = 2,  // cp.async, sm_80 and later
};

// y = x * W for a weight in packed form, with the plan made for this batch size and device.
struct LinearW4A16Params {
  const void* x = nullptr;  // [m, k] BF16, row stride x_stride elements, rows 16-byte aligned
  void* y = nullptr;        // [m, n] BF16, row stride y_stride elements, rows 4-byte aligned
  int64_t x_stride = 0;     // multiple of 8
  int64_t y_stride = 0;     // even
  int32_t m = 0;            // 1 or more; more than rows_per_pass run in passes
  int32_t k = 0;            // multiple of 8
  int32_t n = 0;            // multiple of 8

  // Packed weight (pack.h), in device memory.
  const uint8_t* records = nullptr;  // 16-byte aligned
  int32_t groups_per_chunk = 1;      // 1, 2 or 4
  bool has_zeros = false;

  // Plan (plan.h), in device memory.
  const Unit* units = nullptr;
  const WarpPlan* warps = nullptr;  // [num_blocks * num_warps], 64-byte aligned
  const RowInfo* rows = nullptr;
  int32_t num_blocks = 0;
  int32_t num_warps = 0;        // of a block; at most 16, and 8 for more than 16 rows a pass
  int32_t stage_bytes = 0;      // the largest unit, a multiple of 16
  int32_t rows_per_pass = 32;   // most rows of one kernel: 8, 16 or 32
  int32_t slice_chunks = 0;     // the longest slice
  int32_t num_first_slots = 0;  // most of any block

  // Workspace, private to one stream: partial sums (any content) and counters, which must be zero
  // before the first launch and are left zero.
  float* workspace = nullptr;    // LinearW4A16WorkspaceBytes, 16-byte aligned
  uint32_t* counters = nullptr;  // [num strips * kBlocksPerStrip]

  CopyPath path = CopyPath::kAuto;
  bool programmatic_launch = false;  // may start before the kernel before it ends (sm_90)
  int32_t early_stages = 1;          // copies that a warp starts before the activations are read
  int32_t shared_bytes_limit = 0;    // 0: what the device allows a block
};

// Bytes of `workspace` for a plan with `num_pieces` partial sums.
int64_t LinearW4A16WorkspaceBytes(int64_t num_pieces, int32_t m);

// Queues the kernel. cudaErrorInvalidValue for sizes, strides, pointers or alignments outside the
// limits above; cudaErrorInvalidConfiguration when two stages and the slice's activations do not
// fit in shared memory (use more slices); launch errors as they come. Does not synchronise; may be
// captured into a graph. Deterministic: the same plan and inputs give the same bits, and a row of y
// does not depend on the other rows of x. x must be finite: a row with an infinity or NaN gives
// NaNs. Source: paper sections on the fused kernel; design "kernel".
cudaError_t LaunchLinearW4A16(const LinearW4A16Params& params, cudaStream_t stream);

}  // namespace flashquant::cuda
