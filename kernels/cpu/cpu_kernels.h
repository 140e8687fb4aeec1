// The CPU backend's ops as functions: same structs and contracts as Backend, rows spread over the
// pool's threads. Pointers and ranges have been checked by CpuBackend where they can be wrong.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/math_util.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/linear_task.h"
#include "kernels/cpu/packed_linear.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/op_params.h"

namespace flashquant {

// Calls body(row) for all rows of `width` elements; alone on the calling thread when that is little
// work.
template <typename Body>
void ForRows(ThreadPool& pool, int64_t num_rows, int64_t width, const Body& body) {
  constexpr int64_t kElementsPerTask = 8192;
  const int64_t task_rows = kElementsPerTask / (width > 0 ? width : 1) + 1;
  pool.ParallelFor(CeilDiv(num_rows, task_rows), [&](int64_t task, int32_t /*thread*/) {
    const int64_t end = (task + 1) * task_rows < num_rows ? (task + 1) * task_rows : num_rows;
    for (int64_t row = task * task_rows; row < end; ++row) body(row);
  });
}

// Memory of the linear op, grown to the largest call so far.
struct LinearScratch {
  HostMemory x;                   // interleaved copies of x and its sums
  std::vector<LinearTask> tasks;  // of the current call
};

// RESOURCE_EXHAUSTED when the scratch cannot grow.
absl::Status LinearCpu(const LinearParams& params, ThreadPool& pool, LinearScratch& scratch);

// Row `row` of a packed table as floats: [k].
void UnpackRow(const PackedLinear& table, int64_t row, float* out);
// INVALID_ARGUMENT for an id outside the table, or an INT4 table.
absl::Status EmbeddingCpu(const EmbeddingParams& params, ThreadPool& pool);

void RmsNormCpu(const RmsNormParams& params, ThreadPool& pool);
void LayerNormCpu(const LayerNormParams& params, ThreadPool& pool);
void HeadNormCpu(const HeadNormParams& params, ThreadPool& pool);
void AddPositionsCpu(const AddPositionsParams& params, ThreadPool& pool);
void ReluCpu(const ReluParams& params, ThreadPool& pool);
// kv_dtype of this and the attention: F32, BF16 or F8_E4M3.
void RopeAndKvWriteCpu(const RopeAndKvWriteParams& params, DType kv_dtype, ThreadPool& pool);
void SiluAndMulCpu(const SiluAndMulParams& params, ThreadPool& pool);
void GatherRowsCpu(const GatherRowsParams& params, ThreadPool& pool);

// Keys that one softmax step of the attention covers, counted from position 0.
inline constexpr int32_t kAttentionTileKeys = 64;

// Floats of scratch that one thread of PagedAttentionCpu needs.
int64_t AttentionScratchFloats(const PagedAttentionParams& params, DType kv_dtype);
// scratch: [threads][AttentionScratchFloats].
void PagedAttentionCpu(const PagedAttentionParams& params, DType kv_dtype, ThreadPool& pool,
                       float* scratch);

void SampleTokensCpu(const SampleTokensParams& params, ThreadPool& pool);

// The name of the SIMD target that the kernels run on here: "AVX3" is AVX-512, "AVX3_DL"
// AVX-512 with VNNI.
const char* CpuTargetName();

}  // namespace flashquant
