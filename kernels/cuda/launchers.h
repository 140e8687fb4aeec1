// Plain C++ declarations of the CUDA kernels' launchers: one params struct and one function per op.
// No absl here (nvcc compiles the callers' side of it too); the backend turns cudaError_t into a
// status.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/linear_w4a16/packed_format.h"
#include "kernels/cuda/linear_w4a16/plan.h"

namespace flashquant::cuda {

// How weights travel from global to shared memory.
enum class CopyPath : uint8_t {
  kAuto = 0,     // bulk copies where the device has them
  kBulk = 1,     // cp.async.bulk + mbarrier, needs sm_90
  kCpAsync = 2,  // cp.async, sm_80 and later
};

// y = x * W for a weight in packed form, with a plan made for this number of rows and this device.
struct LinearW4A16Params {
  const void* x = nullptr;  // [m, k] BF16, row stride x_stride elements, rows 16-byte aligned
  void* y = nullptr;        // [m, n] BF16, row stride y_stride elements, rows 8-byte aligned
  int64_t x_stride = 0;     // multiple of 8
  int64_t y_stride = 0;     // multiple of 4
  int32_t m = 0;            // 1 or more; more than rows_per_pass run in passes

  PackedLayout layout;              // k and n multiples of 8
  const uint8_t* weight = nullptr;  // layout.num_bytes in device memory, 16-byte aligned
  LinearPlan plan;                  // for min(m, rows_per_pass) rows

  // Private to one stream: partial sums (any content) and counters, which must be zero before the
  // first launch and are left zero.
  float* workspace = nullptr;    // LinearW4A16WorkspaceBytes, 16-byte aligned, never null
  uint32_t* counters = nullptr;  // [num_strips]

  CopyPath path = CopyPath::kAuto;
  bool programmatic_launch = false;  // may start before the kernel before it ends (sm_90)
  int32_t rows_per_pass = 32;        // most rows of one kernel: 8, 16 or 32
  int32_t shared_bytes_limit = 0;    // 0: what the device allows a block
};

// What the planner must know of the current device. Errors of the runtime as they come.
cudaError_t QueryDeviceShape(DeviceShape* shape);

// Bytes of `workspace` for up to `m` rows.
int64_t LinearW4A16WorkspaceBytes(const PackedLayout& layout, const LinearPlan& plan, int32_t m);

// Queues the kernel. cudaErrorInvalidValue for sizes, strides, pointers or alignments outside the
// limits above; cudaErrorInvalidConfiguration when the plan does not fit in shared memory; launch
// errors as they come. Does not synchronise; may be captured into a graph. Deterministic: the same
// plan and inputs give the same bits, and a row of y does not depend on the other rows of x. x must
// be finite and less than 2^61, scales less than 2^55: a row with more, an infinity or NaN gives
// NaNs and infinities, the signs of which mean nothing. Where a group's sums are less than 2^-53
// they lose digits (dense.cuh). Source: paper sections on the fused kernel; design "kernel".
cudaError_t LaunchLinearW4A16(const LinearW4A16Params& params, cudaStream_t stream);

// The same product by a kernel for many rows, which dequantises a weight once for up to 128 of
// them. Takes no notice of plan, path, rows_per_pass and shared_bytes_limit; workspace and counters
// as below, otherwise the same rules. Needs a device of compute capability 9.0 and code for it
// (HasLinearManyRows), else cudaErrorNotSupported.
cudaError_t LaunchLinearManyRows(const LinearW4A16Params& params, cudaStream_t stream);

// For the current device.
bool HasLinearManyRows();

// Bytes of workspace for up to `m` rows on a device of `num_sms`; counters for up to `m` rows.
int64_t LinearManyRowsWorkspaceBytes(int32_t m, int32_t num_sms);
int64_t LinearManyRowsCounters(const PackedLayout& layout, int32_t m);

}  // namespace flashquant::cuda
