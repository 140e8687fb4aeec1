// Unpacks a weight in the fused kernel's form into a BF16 matrix: how a layer is multiplied with
// more rows than the fused kernel is for. One block a unit (32 channels x 256 features), which it
// puts together in shared memory and writes row by row.
#include <cuda_bf16.h>

#include "kernels/cuda/backend/unpack_weight.h"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileStride = kUnitK + 4;  // floats; channels start in different banks

// The eight codes of word `index` of a chunk, dequantised (part 1 of the format).
__device__ void UnpackWord(const uint8_t* chunk, int index, const PackedLayout& layout,
                           const UnpackTables& tables, float* tile) {
  const uint32_t codes = reinterpret_cast<const uint32_t*>(chunk)[index] ^ tables.code_flip;
  const uint4 places = *reinterpret_cast<const uint4*>(tables.code_place[index]);
  const uint32_t place[4] = {places.x, places.y, places.z, places.w};
  const auto* scales = reinterpret_cast<const __nv_bfloat16*>(chunk + kCodeBytes);
  const __nv_bfloat16* zeros = scales + layout.groups_per_chunk * kStripN;
  const uint32_t features_per_group = kChunkK / layout.groups_per_chunk;
#pragma unroll
  for (int nibble = 0; nibble < 8; ++nibble) {
    const uint32_t at = place[nibble / 2] >> (nibble % 2 * 16) & 0xffffu;
    const uint32_t channel = at >> kCodePlaceBits;
    const uint32_t feature = at % kChunkK;
    const uint32_t entry = feature / features_per_group * kStripN + tables.scale_entry[channel];
    const float code = static_cast<float>(codes >> (4 * nibble) & 0xfu);
    const float zero = layout.has_zeros ? __bfloat162float(zeros[entry]) - 128.0f : 8.0f;
    tile[channel * kTileStride + feature] = __bfloat162float(scales[entry]) * (code - zero);
  }
}

// One quad of a unit's outliers (part 3); padding slots are zeros.
__device__ void AddQuad(const uint8_t* quad, const UnpackTables& tables, float* tile) {
  const uint4 words = *reinterpret_cast<const uint4*>(quad);
  const uint32_t position[2] = {words.x, words.y};
  const uint32_t value[2] = {words.z, words.w};
  for (int slot = 0; slot < kSlotsPerQuad; ++slot) {
    const uint32_t bits = value[slot / 2] >> (slot % 2 * 16) & 0xffffu;
    if (bits == 0) continue;
    const uint32_t at = tables.slot_place[position[slot / 2] >> (slot % 2 * 16) & 0xffffu];
    tile[(at >> kSlotPlaceBits) * kTileStride + at % kUnitK] += __uint_as_float(bits << 16);
  }
}

// Grid: (units of a strip, strips).
__global__ void __launch_bounds__(kThreads)
    UnpackWeightKernel(PackedLayout layout, const uint8_t* weight, const UnpackTables* table_array,
                       __nv_bfloat16* matrix) {
  __shared__ float tile[kStripN * kTileStride];
  BeginDependent();
  const UnpackTables& tables = *table_array;
  const int64_t unit = static_cast<int64_t>(blockIdx.y) * layout.num_units + blockIdx.x;
  const uint8_t* dense = weight + unit * layout.unit_dense_bytes;
  const int chunk_bytes = layout.unit_dense_bytes / kUnitChunks;
  for (int i = threadIdx.x; i < kUnitChunks * kUnpackWords; i += kThreads) {
    const int chunk = i / kUnpackWords;
    UnpackWord(dense + chunk * chunk_bytes, i % kUnpackWords, layout, tables,
               tile + chunk * kChunkK);
  }
  __syncthreads();
  if (layout.max_outlier_bytes > 0) {
    const OutlierRef ref = reinterpret_cast<const OutlierRef*>(weight + layout.index_offset)[unit];
    const uint8_t* outliers =
        weight + layout.outliers_offset + static_cast<int64_t>(ref.offset) * 16;
    constexpr uint32_t kQuadsPerPiece = kMaxPieceBytes / kQuadBytes;
    for (uint32_t i = threadIdx.x; i < ref.num_16bytes; i += kThreads) {
      // The last quad of a piece is its trailer: offsets, not slots.
      if (i + 1 == ref.num_16bytes || (i + 1) % kQuadsPerPiece == 0) continue;
      AddQuad(outliers + i * kQuadBytes, tables, tile);
    }
    __syncthreads();
  }
  const int first_channel = blockIdx.y * kStripN;
  const int first_feature = blockIdx.x * kUnitK;
  const int num_channels = min(kStripN, layout.n - first_channel);
  const int num_features = min(kUnitK, layout.k - first_feature);
  for (int i = threadIdx.x * 2; i < num_channels * kUnitK; i += kThreads * 2) {
    const int channel = i / kUnitK;
    const int feature = i % kUnitK;
    if (feature >= num_features) continue;
    const float* from = tile + channel * kTileStride + feature;
    *reinterpret_cast<__nv_bfloat162*>(
        matrix + static_cast<int64_t>(first_channel + channel) * layout.k + first_feature +
        feature) = __floats2bfloat162_rn(from[0], from[1]);
  }
}

}  // namespace

cudaError_t LaunchUnpackWeight(const PackedLayout& layout, const uint8_t* weight,
                               const UnpackTables* tables, void* matrix, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(layout.num_units),
                  static_cast<unsigned>(layout.num_strips));
  return LaunchDependent(UnpackWeightKernel, grid, kThreads, 0, stream, layout, weight, tables,
                         static_cast<__nv_bfloat16*>(matrix));
}

}  // namespace flashquant::cuda
