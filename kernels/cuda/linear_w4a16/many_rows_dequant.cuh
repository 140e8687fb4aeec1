// Dequantising for the many-rows kernel: a warp turns a strip's chunk into 32 rows of the tile's
// BF16 matrix in shared memory and adds the outliers there.
//
// The matrix lies as warpgroup MMAs read it: two halves of 64 features, rows of 128 bytes, their
// 16-byte pieces exchanged by row % 8. Row r of a strip's 32 is channel 4 * (r % 8) + r / 8, so
// that what a warp stores at once lies in different banks and a lane's sums are neighbours.
#pragma once

#include "kernels/cuda/linear_w4a16/codes.cuh"
#include "kernels/cuda/linear_w4a16/many_rows_plan.h"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

// Lane g's four channels are rows RowInEight(g) of each 8: the order in which the 16 lanes that
// store at once meet all of a row's pieces.
__device__ __forceinline__ uint32_t RowInEight(uint32_t g) { return (g << 1 & 6) | g >> 2; }
__device__ __forceinline__ uint32_t ChannelOfRow(uint32_t row) { return row >> 1 | (row & 1) << 2; }

// A lane's part of a strip's chunk.
template <int kGroups, bool kZeros>
struct LaneCodes {
  uint4 codes[4];  // of a pair of k16 steps each
  uint2 scales[kGroups];
  uint2 zeros[kZeros ? kGroups : 1];

  // `raw`: shared address of the strip's chunk.
  __device__ __forceinline__ void Load(uint32_t raw, int lane) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) codes[pair] = LoadShared16(raw + pair * 512 + lane * 16);
    const uint32_t from = raw + kCodeBytes + (static_cast<uint32_t>(lane) >> 2) * 8;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      scales[group] = LoadShared8(from + group * kGroupScaleBytes);
      if (kZeros) zeros[group] = LoadShared8(from + (kGroups + group) * kGroupScaleBytes);
    }
  }

  // `rows`: shared address of the strip's 32 rows in the tile.
  __device__ __forceinline__ void Store(uint32_t rows, int lane) const {
    const uint32_t row = RowInEight(static_cast<uint32_t>(lane) >> 2);
    const uint32_t t = static_cast<uint32_t>(lane) & 3;
    const uint32_t lane_row = rows + row * 128 + (t & 1) * 8;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint32_t words[4] = {codes[pair].x, codes[pair].y, codes[pair].z, codes[pair].w};
      const int group = pair * kGroups / 4;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int h = w % 2;
        // Step w / 2: features 32 pair + 16 step + 4t .. + 3.
        const uint32_t piece = static_cast<uint32_t>(4 * (pair % 2) + 2 * (w / 2)) + (t >> 1);
        const uint32_t at =
            lane_row + static_cast<uint32_t>(pair / 2) * kTileHalfBytes + ((piece ^ row) << 4);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const uint32_t scale = Twice(block == 0 ? scales[group].x : scales[group].y, h);
          const uint32_t zero =
              kZeros
                  ? Twice(block == 0 ? zeros[kZeros ? group : 0].x : zeros[kZeros ? group : 0].y, h)
                  : 0x43084308u;
          const uint32_t low = DequantPair(words[w], block, scale, zero);
          const uint32_t high = DequantPair(words[w], block + 2, scale, zero);
          asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(
                           at + static_cast<uint32_t>(2 * block + h) * 1024),
                       "r"(low), "r"(high)
                       : "memory");
        }
      }
    }
  }
};

// Where in a strip's rows two slots' outliers belong, from their positions (packed_format.h), one
// in each half of the word: bits move to half (14), block (11), h (10), row in eight (9 to 7) and
// feature (6 to 1); then the pieces are exchanged.
__device__ __forceinline__ uint32_t PlacesOf(uint32_t positions) {
  const uint32_t p = positions;
  const uint32_t place = (p >> 3 & 0x00620062) | (p >> 5 & 0x00040004) | (p >> 2 & 0x00180018) |
                         (p << 4 & 0x40004000) | (p << 5 & 0x00800080) | (p << 8 & 0x03000300) |
                         (p << 7 & 0x04000400) | (p >> 1 & 0x08000800);
  return place ^ (place >> 3 & 0x00700070);
}

// Adds a quad's outliers that are in the chunk of which `chunk_bits` is 0 or 0x0800 in each half.
// No two slots that are not null have one place, so that all can be read before any is written.
__device__ __forceinline__ void AddQuad(const uint4& quad, uint32_t rows, uint32_t chunk_bits) {
  const uint32_t places[2] = {PlacesOf(quad.x), PlacesOf(quad.y)};
  const uint32_t other[2] = {(quad.x ^ chunk_bits) & 0x08000800,
                             (quad.y ^ chunk_bits) & 0x08000800};
  const uint32_t values[2] = {quad.z, quad.w};
  uint32_t at[kSlotsPerQuad];
  uint32_t value[kSlotsPerQuad];
  bool here[kSlotsPerQuad];
  uint32_t old[kSlotsPerQuad] = {};
#pragma unroll
  for (int slot = 0; slot < kSlotsPerQuad; ++slot) {
    const uint32_t half = slot % 2 == 0 ? 0x0000ffffu : 0xffff0000u;
    value[slot] = slot % 2 == 0 ? values[slot / 2] & half : values[slot / 2] >> 16;
    here[slot] = value[slot] != 0 && (other[slot / 2] & half) == 0;
    at[slot] = rows + (slot % 2 == 0 ? places[slot / 2] & half : places[slot / 2] >> 16);
    if (here[slot]) old[slot] = LoadShared2(at[slot]);
  }
#pragma unroll
  for (int slot = 0; slot < kSlotsPerQuad; ++slot) {
    if (!here[slot]) continue;
    const __nv_bfloat162 sum =
        __hfma2(AsPair(value[slot]), AsPair(kOutlierScale), AsPair(old[slot]));
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at[slot]), "h"(__bfloat16_as_ushort(sum.x))
                 : "memory");
  }
}

// A lane's outliers of a unit: the first ones in registers.
class LaneOutliers {
 public:
  // `ref`: shared address of the OutlierRef; `raw`: of the first `room` bytes of the record.
  __device__ __forceinline__ void Load(uint32_t ref, uint32_t raw, uint32_t room, int lane) {
    const uint2 v = LoadShared8(ref);
    ref_ = {v.x, v.y};
#pragma unroll
    for (uint32_t i = 0; i < kEarly; ++i) {
      const uint32_t at = (i * 32 + static_cast<uint32_t>(lane)) * kQuadBytes;
      quads_[i] = at < room ? LoadShared16(raw + at) : uint4{};
    }
    in_registers_ = min(kEarly * 32, room / kQuadBytes);
  }
  // Whether Add reads from `raw` or `records`.
  __device__ __forceinline__ bool HasMore() const { return ref_.num_16bytes > in_registers_; }

  // Adds those of chunk `chunk` to the strip's rows. `records`: all outliers of the layer.
  __device__ __forceinline__ void Add(uint32_t raw, uint32_t room, const uint4* records,
                                      uint32_t rows, uint32_t chunk, int lane) const {
    const uint32_t chunk_bits = chunk * 0x08000800;
#pragma unroll
    for (uint32_t i = 0; i < kEarly; ++i) {
      const uint32_t quad = i * 32 + static_cast<uint32_t>(lane);
      if (quad < in_registers_ && IsSlots(quad)) AddQuad(quads_[i], rows, chunk_bits);
    }
    for (uint32_t i = in_registers_ + static_cast<uint32_t>(lane); i < ref_.num_16bytes; i += 32) {
      if (!IsSlots(i)) continue;
      const uint4 quad = i * kQuadBytes < room ? LoadShared16(raw + i * kQuadBytes)
                                               : __ldg(records + ref_.offset + i);
      AddQuad(quad, rows, chunk_bits);
    }
  }

 private:
  static constexpr uint32_t kEarly = 2;  // quads

  // The last quad of a piece holds offsets.
  __device__ __forceinline__ bool IsSlots(uint32_t quad) const {
    return quad + 1 < ref_.num_16bytes && (quad + 1) % (kMaxPieceBytes / kQuadBytes) != 0;
  }

  OutlierRef ref_;
  uint32_t in_registers_ = 0;
  uint4 quads_[kEarly];
};

}  // namespace flashquant::cuda
