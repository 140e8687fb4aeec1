// Outliers of a unit: each is one column of an MMA. Its A fragment has the value at the outlier's
// channel and zeros elsewhere, its x row comes by ldmatrix with the outlier's own address, and the
// product lands in the accumulators of the dense path: no shared sums, no barrier, no atomics.
// A round takes 16 slots of each of the two blocks of channels, one MMA each, without a branch:
// what belongs to the other block, or is behind the end, has no channel in common with the lane and
// gives zero. Source: design "kernel" 4, strategy 3b, changed as packed_format.h says.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/linear_w4a16/activations.cuh"
#include "kernels/cuda/linear_w4a16/dense.cuh"

namespace flashquant::cuda {

inline constexpr uint32_t kChannelMask = 0x100f100f;  // of two positions
inline constexpr uint32_t kFeatureMask = 0x0ff0;      // of one: the offset of its row of x

// 0xffff in each half where the halves are equal. Both operands hold channel fields of positions,
// which as FP16 are distinct finite numbers, so that the half-precision comparison can do it in one
// instruction.
__device__ __forceinline__ uint32_t EqualHalvesMask(uint32_t a, uint32_t b) {
  __half2 x;
  __half2 y;
  memcpy(&x, &a, sizeof(x));
  memcpy(&y, &b, sizeof(y));
  return __heq2_mask(x, y);
}

// The A registers of a lane's quad: channels g and g + 8 of the block whose field is in `low`.
__device__ __forceinline__ void ExpandQuad(const uint4& quad, uint32_t low, uint32_t (&a)[4]) {
  const uint32_t high = low | 0x00080008;
  const uint32_t first = quad.x & kChannelMask;
  const uint32_t second = quad.y & kChannelMask;
  a[0] = quad.z & EqualHalvesMask(first, low);
  a[1] = quad.z & EqualHalvesMask(first, high);
  a[2] = quad.w & EqualHalvesMask(second, low);
  a[3] = quad.w & EqualHalvesMask(second, high);
}

// Where a lane reads its part of a piece's rounds.
class OutlierRounds {
 public:
  static constexpr uint32_t kRoundBytes = 4 * kQuadBytes;

  // What a lane needs for one round: the position of the slot whose x row it fetches, and its
  // quads.
  struct Round {
    uint32_t position;
    uint4 quads[kBlocksPerStrip];
  };

  OutlierRounds() = default;  // none
  // The piece is at shared address `record`, its trailer at quad `num_quads`.
  __device__ OutlierRounds(uint32_t record, uint32_t num_quads, int lane)
      : trailer_(record + num_quads * kQuadBytes) {
    const uint32_t words = LoadShared4(trailer_);
    const uint32_t second = record + (words & 0xffff);
    num_bytes_ = words >> 16;
    quads_[0] = record + (lane & 3) * kQuadBytes;
    quads_[1] = second + (lane & 3) * kQuadBytes;
    // Lane (matrix, row): matrices 0 and 1 are those of block 0's MMA.
    const uint32_t slot = ((lane & 8) / 4 + (lane & 1)) * 2;
    row_ = ((lane & 16) != 0 ? second : record) + (lane & 7) / 2 * kQuadBytes + slot;
    last_row_ = trailer_ + slot;
  }

  __device__ uint32_t num_bytes() const { return num_bytes_; }
  // The round at `at` bytes; behind the end, nothing.
  __device__ Round Load(uint32_t at) const {
    return {LoadSharedEarly2(min(row_ + at, last_row_)),
            {LoadSharedEarly16(min(quads_[0] + at, trailer_)),
             LoadSharedEarly16(min(quads_[1] + at, trailer_))}};
  }

 private:
  uint32_t trailer_ = 0;
  uint32_t num_bytes_ = 0;
  uint32_t quads_[kBlocksPerStrip] = {};
  uint32_t row_ = 0;
  uint32_t last_row_ = 0;
};

// Adds a piece to `acc`. `round`: its first one, which the caller loads early. `x`: shared address
// of the unit's first feature in batch block 0.
template <int kBatchBlocks>
__device__ __forceinline__ void AddOutliers(const KernelArgs& args, const OutlierRounds& rounds,
                                            OutlierRounds::Round round, uint32_t x, int lane,
                                            Accumulators<kBatchBlocks>& acc) {
  const uint32_t g_pair = (lane >> 2) * 0x00010001u;
  uint32_t at = 0;
  // Adds a round while the next one is loaded.
  const auto add = [&](const OutlierRounds::Round& now) {
    at += OutlierRounds::kRoundBytes;
    uint32_t b[kBatchBlocks][4];
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      LdMatrixX4Trans(b[nb], x + (now.position & kFeatureMask) + nb * args.shared.x_block_pitch);
    }
    const OutlierRounds::Round next = rounds.Load(at);
    uint32_t a[kBlocksPerStrip][4];
    ExpandQuad(now.quads[0], g_pair, a[0]);
    ExpandQuad(now.quads[1], g_pair | 0x10001000, a[1]);
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      MmaBf16(acc[0][nb], a[0], b[nb][0], b[nb][1], acc[0][nb]);
      MmaBf16(acc[1][nb], a[1], b[nb][2], b[nb][3], acc[1][nb]);
    }
    return next;
  };
  // Two rounds a turn, so that each stays in the registers that it was loaded to.
#pragma unroll 1
  while (at < rounds.num_bytes()) {
    const OutlierRounds::Round second = add(round);
    if (at >= rounds.num_bytes()) break;
    round = add(second);
  }
}

}  // namespace flashquant::cuda
