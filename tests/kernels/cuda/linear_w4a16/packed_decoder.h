// Decoder of the fused kernel's weight form for tests, written from the text of packed_format.h and
// sharing nothing with the packers but its constants. Reports what breaks the text as failures of
// the running test.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

// What stands at one channel and feature of the dense part.
struct DecodedWeight {
  int code = 0;  // 0 to 15
  uint16_t scale = 0;
  int zero_point = 8;
};

struct DecodedOutlier {
  int64_t n = 0;
  int64_t k = 0;
  uint16_t value = 0;
  friend auto operator<=>(const DecodedOutlier&, const DecodedOutlier&) = default;
};

class PackedDecoder {
 public:
  PackedDecoder(const PackedLayout& layout, const std::vector<uint8_t>& bytes)
      : layout_(layout), bytes_(bytes) {
    for (uint32_t feature = 0; feature < kUnitK; ++feature) {
      feature_of_row_[XRow(feature)] = static_cast<int>(feature);
    }
  }

  DecodedWeight At(int64_t n, int64_t k) const {
    const int64_t unit = n / kStripN * layout_.num_units + k / kUnitK;
    const int64_t chunk = k % kUnitK / kChunkK;
    const int64_t base = unit * layout_.unit_dense_bytes +
                         chunk * ChunkDenseBytes(layout_.groups_per_chunk, layout_.has_zeros);
    const int64_t channel = n % kStripN;  // = 4g + 2 * block + half
    const int64_t block = channel % 4 / 2;
    const int64_t k16 = k % kChunkK / 16;  // step inside the chunk
    const int64_t in_step = k % 16;        // = 4t + i + 2 * (r / 2)
    const int64_t g = channel / 4;
    const int64_t t = in_step / 4;
    const int64_t i = in_step % 2;
    const int64_t r = in_step % 4 / 2 * 2 + block;
    const int64_t word_index = k16 % 2 * 2 + channel % 2;
    const auto word = Read<uint32_t>(base + k16 / 2 * 512 + (4 * g + t) * 16 + word_index * 4);
    DecodedWeight weight;
    weight.code = static_cast<int>(word >> (4 * r + 16 * i) & 0xf);
    const int64_t group = k % kChunkK / (kChunkK / layout_.groups_per_chunk);
    const int64_t entry = group * kGroupScaleBytes + channel * 2;
    weight.scale = Read<uint16_t>(base + kCodeBytes + entry);
    if (layout_.has_zeros) {
      const auto zero =
          Read<uint16_t>(base + kCodeBytes + layout_.groups_per_chunk * kGroupScaleBytes + entry);
      EXPECT_EQ(zero & 0xfff0, 0x4300) << "128 + z in BF16";
      weight.zero_point = zero & 0xf;
    }
    return weight;
  }

  OutlierRef Ref(int64_t unit) const {
    return Read<OutlierRef>(layout_.index_offset + unit * int64_t{sizeof(OutlierRef)});
  }

  // All outliers, sorted.
  std::vector<DecodedOutlier> Outliers() const {
    std::vector<DecodedOutlier> out;
    const int64_t num_units = int64_t{layout_.num_strips} * layout_.num_units;
    for (int64_t unit = 0; unit < num_units; ++unit) {
      const OutlierRef ref = Ref(unit);
      int64_t at = layout_.outliers_offset + int64_t{ref.offset} * 16;
      const int64_t end = at + int64_t{ref.num_16bytes} * 16;
      for (; at < end; at += kMaxPieceBytes) {
        DecodePiece(unit, at, std::min<int64_t>(end - at, kMaxPieceBytes), out);
      }
    }
    std::sort(out.begin(), out.end());
    return out;
  }

 private:
  template <typename T>
  T Read(int64_t at) const {
    T value{};
    if (at < 0 || at + int64_t{sizeof(T)} > static_cast<int64_t>(bytes_.size())) {
      ADD_FAILURE() << "read of byte " << at << " of " << bytes_.size();
      return value;
    }
    std::memcpy(&value, bytes_.data() + at, sizeof(T));
    return value;
  }

  void DecodePiece(int64_t unit, int64_t at, int64_t num_bytes,
                   std::vector<DecodedOutlier>& out) const {
    const int64_t num_quads = num_bytes / kQuadBytes - 1;
    ASSERT_GT(num_quads, 0) << "a piece has slots";
    std::array<int64_t, kBlocksPerStrip> in_block{};
    int64_t num_padding = 0;
    for (int64_t i = 0; i < num_quads * kSlotsPerQuad; ++i) {
      const int64_t quad = at + i / kSlotsPerQuad * kQuadBytes + i % kSlotsPerQuad * 2;
      const auto position = Read<uint16_t>(quad);
      const auto value = Read<uint16_t>(quad + 8);
      if (value == 0) {
        ++num_padding;
        continue;
      }
      ASSERT_EQ(num_padding, 0) << "padding stands last";
      const int block = position >> 12;
      ASSERT_LT(block, kBlocksPerStrip);
      ASSERT_TRUE(block == 1 || in_block[1] == 0) << "block 0 stands first";
      ++in_block[static_cast<size_t>(block)];
      const int64_t row = position % 16;
      const int64_t channel = row % 8 * 4 + block * 2 + row / 8;
      out.push_back({unit / layout_.num_units * kStripN + channel,
                     unit % layout_.num_units * kUnitK + feature_of_row_[position >> 4 & 0xff],
                     static_cast<uint16_t>(value + (60 << 7))});  // stored times 2^-60
    }
    EXPECT_LT(num_padding, kSlotsPerQuad);
    const int64_t trailer = at + num_quads * kQuadBytes;
    const int64_t second = in_block[0] / kSlotsPerQuad;
    const int64_t first_quads = (in_block[0] + kSlotsPerQuad - 1) / kSlotsPerQuad;
    EXPECT_EQ(Read<uint16_t>(trailer), second * kQuadBytes);
    EXPECT_EQ(Read<uint16_t>(trailer + 2), std::max(first_quads, num_quads - second) * kQuadBytes);
    for (int i = 4; i < kQuadBytes; i += 2) EXPECT_EQ(Read<uint16_t>(trailer + i), 0);
  }

  const PackedLayout& layout_;
  const std::vector<uint8_t>& bytes_;
  std::array<int, kUnitK> feature_of_row_{};
};

}  // namespace flashquant::cuda
