// Reading a packed weight by the places and tables gives back the canonical codes, scales, zero
// points and outliers.
#include "kernels/cuda/backend/unpack_tables.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/backend/packed_parts.h"
#include "tests/support/random_weights.h"

namespace flashquant::cuda {
namespace {

template <typename T>
T ReadAt(const std::vector<uint8_t>& bytes, int64_t at) {
  T value{};
  EXPECT_LE(at + int64_t{sizeof(T)}, static_cast<int64_t>(bytes.size()));
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

// Checks the dense part of one chunk.
void ExpectChunk(const PackedLinear& packed, const Int4Weight& weight, int64_t base,
                 int64_t first_n, int64_t first_k) {
  const PackedLayout& layout = packed.layout;
  for (uint32_t index = 0; index < kCodeBytes / 4; ++index) {
    const uint32_t codes = ReadAt<uint32_t>(packed.bytes, base + 4 * index);
    const uint32_t pair = index / 128;
    const uint32_t lane = index / 4 % 32;
    const uint32_t word = index % 4;
    for (uint32_t nibble = 0; nibble < 8; ++nibble) {
      const int64_t channel = CodeChannel(lane, word, nibble % 4);
      const int64_t feature = CodeFeature(pair, lane, word, nibble % 4) + nibble / 4;
      const int64_t n = first_n + channel;
      const int64_t k = first_k + feature;
      if (n >= weight.n || k >= weight.k) continue;
      const int64_t group = k / weight.group_size;
      const int64_t entry = feature / (kChunkK / layout.groups_per_chunk) * kStripN + channel;
      ASSERT_EQ(static_cast<int>(codes >> (4 * nibble) & 0xf), weight.Code(n, k)) << n << " " << k;
      ASSERT_EQ(ReadAt<uint16_t>(packed.bytes, base + kCodeBytes + 2 * entry),
                weight.scales[static_cast<size_t>(n * weight.groups_per_row() + group)].bits);
      if (!layout.has_zeros) continue;
      const int64_t zeros = base + kCodeBytes + layout.groups_per_chunk * kGroupScaleBytes;
      const BFloat16 zero = {ReadAt<uint16_t>(packed.bytes, zeros + 2 * entry)};
      ASSERT_EQ(ToFloat(zero), 128.0f + static_cast<float>(weight.ZeroPoint(n, group)));
    }
  }
}

using Outliers = std::map<std::pair<int64_t, int64_t>, uint16_t>;  // by (n, k)

void ReadOutliers(const UnpackTables& tables, const PackedLinear& packed, int64_t unit,
                  int64_t first_n, int64_t first_k, Outliers* outliers) {
  const PackedLayout& layout = packed.layout;
  const auto ref =
      ReadAt<OutlierRef>(packed.bytes, layout.index_offset + unit * int64_t{sizeof(OutlierRef)});
  constexpr uint32_t kQuadsPerPiece = kMaxPieceBytes / kQuadBytes;
  for (uint32_t i = 0; i + 1 < ref.num_16bytes; ++i) {
    if ((i + 1) % kQuadsPerPiece == 0) continue;  // a trailer
    const int64_t quad = layout.outliers_offset + (int64_t{ref.offset} + i) * kQuadBytes;
    for (int slot = 0; slot < kSlotsPerQuad; ++slot) {
      const auto value = ReadAt<uint16_t>(packed.bytes, quad + 8 + 2 * slot);
      if (value == 0) continue;
      const auto position = ReadAt<uint16_t>(packed.bytes, quad + 2 * slot);
      const int place = tables.slot_place[position];
      const auto at = std::pair(first_n + (place >> kSlotPlaceBits), first_k + place % kUnitK);
      EXPECT_TRUE(outliers->emplace(at, value + (kOutlierExponent << 7)).second) << "twice";
    }
  }
}

TEST(UnpackTablesTest, GiveBackTheCanonicalWeight) {
  const UnpackTables tables = MakeUnpackTables();
  for (const int64_t group_size : {32, 64, 128, -1}) {
    for (const double density : {0.0, 0.02, 1.0}) {
      RandomLinearOptions options;
      options.n = 72;
      options.k = 520;
      options.group_size = group_size;
      options.symmetric = group_size == 64;
      options.density = density;
      const RandomLinear layer(options);
      const LinearPart part = layer.part();
      const PackedLinear packed = PackPart(part);
      Outliers outliers;
      for (int64_t strip = 0; strip < packed.layout.num_strips; ++strip) {
        for (int64_t i = 0; i < packed.layout.num_units; ++i) {
          const int64_t unit = strip * packed.layout.num_units + i;
          const int64_t chunk_bytes = packed.layout.unit_dense_bytes / kUnitChunks;
          for (int64_t chunk = 0; chunk < kUnitChunks; ++chunk) {
            ExpectChunk(packed, *part.int4,
                        unit * packed.layout.unit_dense_bytes + chunk * chunk_bytes,
                        strip * kStripN, i * kUnitK + chunk * kChunkK);
          }
          ReadOutliers(tables, packed, unit, strip * kStripN, i * kUnitK, &outliers);
        }
      }
      Outliers expected;
      if (part.outliers != nullptr) {
        part.outliers->ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
          expected[{n, k}] = bits;
        });
      }
      EXPECT_EQ(outliers, expected) << "group " << group_size << ", density " << density;
    }
  }
}

}  // namespace
}  // namespace flashquant::cuda
