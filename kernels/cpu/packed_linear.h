// PackedLinear: the CPU backend's form of a linear layer, made once at load from canonical bytes.
//
// Output channels come in blocks of 16, one SIMD lane each; inside a block K runs slowest:
// [block][k / codes_per_word][16 lanes] of 32-bit words. A kernel then works on many channels at
// once and adds up each channel along k in one fixed order, whatever the number of rows: that is
// how a row's result can be exact to the bit in any batch. Outliers are sorted into the same blocks
// and channels, so one pass over a block reads both.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/host_memory.h"

namespace flashquant {

inline constexpr int64_t kBlockLanes = 16;
// Every segment's K is padded to this many codes: the most that a 32-bit word holds.
inline constexpr int64_t kPackedKMultiple = 8;
// Inputs that the dense kernels run over at a time: x of eight rows stays in the L1 cache.
inline constexpr int64_t kTileInputs = 512;
// Sums are cut after this many inputs where no quantization group does it sooner.
inline constexpr int64_t kMaxChunkInputs = 128;
// x is handed to INT4 kernels as x[k] / 16^(k % 4): a code is used where it stands in its half
// word, as code * 16^(k % 4), without being shifted down. Both factors are exact.
inline constexpr int kNibblePhases = 4;

enum class PackedKind : uint8_t { kInt4, kBFloat16, kFloat32, kInt8 };

// Weights in one 32-bit word, lowest bits first along k.
constexpr int64_t CodesPerWord(PackedKind kind) {
  switch (kind) {
    case PackedKind::kInt4:
      return 8;
    case PackedKind::kInt8:
      return 4;
    case PackedKind::kBFloat16:
      return 2;
    case PackedKind::kFloat32:
      break;
  }
  return 1;
}

// Four outliers of one output channel, by k: k and a BF16 value, which in INT4 segments is
// multiplied by 16^(k % 4) to undo the factor in x. A channel's last quad is filled up with value 0
// at k 0.
struct OutlierQuad {
  uint16_t k[4] = {};
  BFloat16 value[4] = {};
};
inline constexpr int64_t kMaxOutlierInputs = int64_t{1} << 16;

// Adjacent output channels stored in one way: a part of the layer. Arrays are [num_blocks] first;
// channels past n in the last block are zero.
struct PackedSegment {
  PackedKind kind = PackedKind::kInt4;
  bool symmetric = false;
  int64_t n_begin = 0;  // first output channel in the layer
  int64_t n = 0;
  int64_t num_blocks = 0;
  int64_t words_per_block = 0;   // K padded / CodesPerWord * 16
  int64_t chunk_inputs = 0;      // inputs between two roundings of the sum: the group, at most 128
  int64_t scales_per_block = 0;  // groups * 16; 16 with one group per row
  bool one_group = false;        // the same scale for every chunk

  HostMemory words;        // uint32_t [num_blocks][words_per_block]
  HostMemory scales;       // BFloat16 [num_blocks][groups][16]; kInt8: [num_blocks][16]
  HostMemory zeros;        // uint8_t [num_blocks][groups][16], unless symmetric
  HostMemory bias;         // float [num_blocks][16], or empty
  HostMemory lane_indptr;  // uint32_t [num_blocks * 16 + 1], first quad of each channel; or empty
  HostMemory outliers;     // OutlierQuad, one spare at the end; or empty: no outliers

  int64_t num_bytes() const {
    return words.num_bytes() + scales.num_bytes() + zeros.num_bytes() + bias.num_bytes() +
           lane_indptr.num_bytes() + outliers.num_bytes();
  }
};

class PackedLinear final : public LinearWeight {
 public:
  PackedLinear(int64_t n, int64_t k, int64_t num_bytes, std::vector<PackedSegment> segments)
      : LinearWeight(n, k, num_bytes), segments_(std::move(segments)) {}

  const std::vector<PackedSegment>& segments() const { return segments_; }
  int64_t k_packed() const { return RoundUp(k(), kPackedKMultiple); }
  int64_t num_tiles() const { return CeilDiv(k(), kTileInputs); }

 private:
  const std::vector<PackedSegment> segments_;
};

// As Backend::PackLinear. INVALID_ARGUMENT for parts that do not fit together, dtypes other than
// those of LinearPart, FP16 outlier values, outlier values of 2^100 and more, outliers with K above
// 65536.
absl::StatusOr<std::unique_ptr<PackedLinear>> MakePackedLinear(std::span<const LinearPart> parts);

}  // namespace flashquant
