// Unpacks a weight in the fused kernel's form into a BF16 matrix: how a layer is multiplied with
// more rows than the fused kernel is for. One block a unit (32 channels x 256 features): each of
// its warps dequantises a pair of k16 steps of a chunk into shared memory, outliers are added
// there, and rows go out whole.
#include "kernels/cuda/backend/unpack_weight.h"
#include "kernels/cuda/linear_w4a16/codes.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {
namespace {

constexpr int kPairsPerChunk = kChunkK / 32;
constexpr int kThreads = kUnitChunks * kPairsPerChunk * 32;
constexpr uint32_t kRowBytes = kUnitK * 2;

// Address of a feature of a channel in the tile. 16-byte pieces of a row are exchanged by channel /
// 4, so that what a warp writes at once lies in different banks as far as possible.
__device__ __forceinline__ uint32_t TileAddress(uint32_t tile, uint32_t channel, uint32_t feature) {
  const uint32_t exchange = (channel >> 2 & 3) << 1 | (channel >> 4 & 1);
  return tile + channel * kRowBytes + (feature / 8 ^ exchange) * 16 + feature % 8 * 2;
}

__device__ __forceinline__ void StoreShared8(uint32_t shared_address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(shared_address), "r"(a), "r"(b) : "memory");
}

// What a lane dequantises: its 16 bytes of a pair of k16 steps (part 1 of the format).
struct CodePair {
  uint4 codes;
  uint2 scales;                            // of channels 4g .. 4g + 3
  uint2 zeros = {0x43084308, 0x43084308};  // 128 + 8

  __device__ CodePair(const PackedLayout& layout, const uint8_t* chunk, int pair, int lane) {
    codes = __ldcs(reinterpret_cast<const uint4*>(chunk + pair * 512) + lane);
    const int group = pair * layout.groups_per_chunk / kPairsPerChunk;
    const uint8_t* const from = chunk + kCodeBytes + (lane >> 2) * 8;
    scales = __ldg(reinterpret_cast<const uint2*>(from + group * kGroupScaleBytes));
    if (!layout.has_zeros) return;
    zeros = __ldg(reinterpret_cast<const uint2*>(from + (layout.groups_per_chunk + group) *
                                                            kGroupScaleBytes));
  }

  // `feature`: the chunk's first in the unit.
  __device__ void Store(uint32_t tile, uint32_t feature, int pair, int lane) const {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      // Registers r and r + 2 are four neighbouring features of a channel.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t scale = Twice(r == 0 ? scales.x : scales.y, w % 2);
        const uint32_t zero = Twice(r == 0 ? zeros.x : zeros.y, w % 2);
        StoreShared8(
            TileAddress(tile, CodeChannel(lane, w, r), feature + CodeFeature(pair, lane, w, r)),
            DequantPair(words[w], r, scale, zero), DequantPair(words[w], r + 2, scale, zero));
      }
    }
  }
};

__device__ __forceinline__ void AddShared(uint32_t address, uint32_t value) {
  const __nv_bfloat16 sum = __float2bfloat16_rn(
      fmaf(LowBf16(value), LowBf16(kOutlierScale), LowBf16(LoadShared2(address))));
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address),
               "h"(*reinterpret_cast<const uint16_t*>(&sum))
               : "memory");
}

// One quad of a unit's outliers (part 3); padding slots are zeros.
__device__ __forceinline__ void AddQuad(const uint4& quad, const UnpackTables& tables,
                                        uint32_t tile) {
  const uint32_t position[2] = {quad.x, quad.y};
  const uint32_t value[2] = {quad.z, quad.w};
#pragma unroll
  for (int slot = 0; slot < kSlotsPerQuad; ++slot) {
    const uint32_t bits = value[slot / 2] >> (slot % 2 * 16) & 0xffffu;
    const uint32_t at =
        __ldg(tables.slot_place + (position[slot / 2] >> (slot % 2 * 16) & 0xffffu));
    if (bits != 0) AddShared(TileAddress(tile, at >> kSlotPlaceBits, at % kUnitK), bits);
  }
}

// Grid: (units of a strip, strips from first_strip on).
__global__ void __launch_bounds__(kThreads)
    UnpackWeightKernel(PackedLayout layout, const uint8_t* weight, const UnpackTables* table_array,
                       int first_strip, uint8_t* matrix) {
  __shared__ __align__(16) uint8_t shared[kStripN * kRowBytes];
  const uint32_t tile = SharedAddress(shared);
  const UnpackTables& tables = *table_array;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = warp / kPairsPerChunk;
  const int pair = warp % kPairsPerChunk;
  const int strip = first_strip + static_cast<int>(blockIdx.y);
  const int64_t unit = static_cast<int64_t>(strip) * layout.num_units + blockIdx.x;
  // Weights and tables do not change while kernels run; the matrix does.
  const CodePair codes(
      layout,
      weight + unit * layout.unit_dense_bytes + chunk * (layout.unit_dense_bytes / kUnitChunks),
      pair, lane);
  OutlierRef ref;
  if (layout.max_outlier_bytes > 0) {
    ref = reinterpret_cast<const OutlierRef*>(weight + layout.index_offset)[unit];
  }
  const uint4* const quads =
      reinterpret_cast<const uint4*>(weight + layout.outliers_offset) + ref.offset;
  uint4 quad = {};
  if (threadIdx.x < ref.num_16bytes) quad = __ldcs(quads + threadIdx.x);
  codes.Store(tile, static_cast<uint32_t>(chunk * kChunkK), pair, lane);
  __syncthreads();
  if (layout.max_outlier_bytes > 0) {
    constexpr uint32_t kQuadsPerPiece = kMaxPieceBytes / kQuadBytes;
    for (uint32_t i = threadIdx.x; i < ref.num_16bytes; i += kThreads) {
      // The last quad of a piece is its trailer: offsets, not slots.
      if (i + 1 == ref.num_16bytes || (i + 1) % kQuadsPerPiece == 0) continue;
      AddQuad(i == threadIdx.x ? quad : __ldcs(quads + i), tables, tile);
    }
    __syncthreads();
  }
  BeginDependent();
  const int first_row = static_cast<int>(blockIdx.y) * kStripN;
  const int first_feature = static_cast<int>(blockIdx.x) * kUnitK;
  const int num_channels = min(kStripN, layout.n - strip * kStripN);
  const int feature = lane * 8;
  if (first_feature + feature >= layout.k) return;
  for (int channel = warp; channel < num_channels; channel += kThreads / 32) {
    uint8_t* const to =
        matrix +
        (static_cast<int64_t>(first_row + channel) * layout.k + first_feature + feature) * 2;
    *reinterpret_cast<uint4*>(to) = LoadShared16(TileAddress(tile, channel, feature));
  }
}

}  // namespace

cudaError_t LaunchUnpackWeight(const PackedLayout& layout, const uint8_t* weight,
                               const UnpackTables* tables, const StripRange& strips, void* matrix,
                               cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(layout.num_units), static_cast<unsigned>(strips.count));
  return LaunchDependent(UnpackWeightKernel, grid, kThreads, 0, stream, layout, weight, tables,
                         strips.first, static_cast<uint8_t*>(matrix));
}

}  // namespace flashquant::cuda
