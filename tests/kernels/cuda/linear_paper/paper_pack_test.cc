// Tests of the packer of the paper's own mapping. The reordered form must have the bytes of the
// Tile-COO encoder, which follows the format's text; codes are found again by the text of
// paper_format.h.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/bench/linear_problem.h"
#include "kernels/cuda/linear_paper/paper_format.h"
#include "kernels/format/tile_coo_encoder.h"

namespace flashquant::cuda {
namespace {

using bench::MakeProblem;
using bench::OutlierLayout;
using bench::Problem;
using bench::ProblemSpec;

constexpr int kThreads = 2;

using Slot = std::tuple<int, int, uint16_t>;  // n, k, value

// Slots of `tiles` tiles of 256 x 128 whose records begin at `records`, sorted.
std::vector<Slot> SlotsOf(const uint32_t* indptr, const uint8_t* records, int tiles, int tiles_k) {
  std::vector<Slot> slots;
  for (int tile = 0; tile < tiles; ++tile) {
    for (uint32_t r = indptr[tile]; r < indptr[tile + 1]; ++r) {
      const uint8_t* record = records + size_t{r} * 16;
      for (size_t s = 0; s < 4; ++s) {
        uint16_t value = 0;
        std::memcpy(&value, record + 8 + 2 * s, 2);
        if (value == 0) continue;
        slots.emplace_back(tile / tiles_k * kPaperTileN + record[4 + s],
                           tile % tiles_k * kPaperTileK + record[s], value);
      }
    }
  }
  std::sort(slots.begin(), slots.end());
  return slots;
}

std::vector<Slot> SlotsOf(const Problem& problem) {
  return SlotsOf(problem.tile_indptr.data(), problem.records.data(),
                 static_cast<int>(problem.tile_indptr.size()) - 1,
                 (problem.spec.k + kPaperTileK - 1) / kPaperTileK);
}

std::vector<uint32_t> IndptrOf(const PaperLinear& packed) {
  std::vector<uint32_t> indptr(static_cast<size_t>(packed.layout.tiles_n * packed.layout.tiles_k) +
                               1);
  std::memcpy(indptr.data(), packed.bytes.data() + packed.layout.indptr_offset, indptr.size() * 4);
  return indptr;
}

Problem RaggedProblem() {
  ProblemSpec spec;
  spec.k = 600;
  spec.n = 312;
  spec.group_size = -1;
  spec.density = 0.03;
  spec.layout = OutlierLayout::kRaggedRecords;
  return MakeProblem(spec, kThreads);
}

TEST(PackPaperTest, ReorderedOutliersAreTheTileCooEncodersBytes) {
  for (const int buckets : {8, 16, 32}) {
    const Problem problem = RaggedProblem();
    const PaperLinear packed =
        PackPaper(problem.weight(), problem.outliers(), buckets, PaperOrder::kReordered, kThreads);
    TileCooGeometry geometry;
    geometry.k = problem.spec.k;
    geometry.n = problem.spec.n;
    geometry.buckets_per_tile = buckets;
    geometry.order_hint = TileCooOrderHint::kPaper;
    std::vector<TileCooSlot> slots;
    for (const auto& [n, k, value] : SlotsOf(problem)) slots.push_back({k, n, value, false});
    const auto encoded = EncodeTileCoo(geometry, slots);
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    const TileCooArrays& arrays = encoded->arrays;
    const auto expect_bytes = [&](int64_t offset, const auto& array, size_t count) {
      EXPECT_EQ(std::memcmp(packed.bytes.data() + offset, array.data(), count * sizeof(array[0])),
                0)
          << buckets << " buckets, offset " << offset;
    };
    const size_t tiles = static_cast<size_t>(geometry.num_tiles());
    const uint32_t records = arrays.tile_indptr[tiles];
    expect_bytes(packed.layout.indptr_offset, arrays.tile_indptr, tiles + 1);
    expect_bytes(packed.layout.buckets_offset, arrays.bucket_info,
                 tiles * static_cast<size_t>(buckets));
    expect_bytes(packed.layout.records_offset, arrays.records, records);
    EXPECT_EQ(packed.layout.num_bytes, packed.layout.records_offset + int64_t{records} * 16);
  }
}

TEST(PackPaperTest, WithoutReorderingColumnsAndRowsKeepTheirOrder) {
  const Problem problem = RaggedProblem();
  const PaperLinear packed =
      PackPaper(problem.weight(), problem.outliers(), 16, PaperOrder::kNone, kThreads);
  const PaperLayout& layout = packed.layout;
  const std::vector<uint32_t> indptr = IndptrOf(packed);
  const uint8_t* records = packed.bytes.data() + layout.records_offset;
  EXPECT_EQ(SlotsOf(indptr.data(), records, layout.tiles_n * layout.tiles_k, layout.tiles_k),
            SlotsOf(problem));
  for (int tile = 0; tile < layout.tiles_n * layout.tiles_k; ++tile) {
    for (int bucket = 0; bucket < 16; ++bucket) {
      uint16_t info[2] = {};
      std::memcpy(info, packed.bytes.data() + layout.buckets_offset + (tile * 16 + bucket) * 4, 4);
      int last = -1;
      for (int i = info[0]; i < info[0] + info[1]; ++i) {
        const uint8_t* record =
            records + (indptr[static_cast<size_t>(tile)] + static_cast<size_t>(i)) * 16;
        EXPECT_EQ(record[4] / 8, bucket) << "128 columns in 16 even ranges";
        const int place = record[4] * kPaperTileK + record[0];
        EXPECT_GT(place, last);
        last = place;
      }
    }
  }
}

TEST(PackPaperTest, CodesAndScalesStandWhereTheFormatSays) {
  ProblemSpec spec;
  spec.k = 384;
  spec.n = 136;
  spec.group_size = 64;
  spec.zero_points = true;
  const Problem problem = MakeProblem(spec, kThreads);
  const PaperLinear packed = PackPaper(problem.weight(), {}, 16, PaperOrder::kNone, kThreads);
  ASSERT_EQ(packed.layout.groups_per_tile, 4);
  ASSERT_EQ(packed.layout.max_records, 0);
  for (int n = 0; n < spec.n; ++n) {
    for (int k = 0; k < spec.k; ++k) {
      const int tile = n / 128 * packed.layout.tiles_k + k / 256;
      const uint8_t* dense = packed.bytes.data() + int64_t{tile} * packed.layout.tile_dense_bytes;
      // The register and the lane that an MMA expects element (row, column) of A in.
      const int row = n % 16;
      const int column = k % 16;
      const int lane = row % 8 * 4 + column % 8 / 2;
      const int r = row / 8 + column / 8 * 2;
      uint32_t word = 0;
      std::memcpy(
          &word, dense + n % 128 / 64 * 8192 + k % 256 / 16 * 512 + lane * 16 + n % 64 / 16 * 4, 4);
      const auto byte = problem.qweight[static_cast<size_t>(n * (problem.k_padded / 2) + k / 2)];
      ASSERT_EQ(word >> (4 * r + 16 * (column % 2)) & 0xf,
                static_cast<uint32_t>(k % 2 == 0 ? byte & 0xf : byte >> 4))
          << n << " " << k;
      const auto group = static_cast<size_t>(n * (problem.k_padded / 64) + k / 64);
      uint16_t scale = 0;
      uint16_t zero = 0;
      std::memcpy(&scale, dense + 16384 + (k % 256 / 64 * 128 + n % 128) * 2, 2);
      std::memcpy(&zero, dense + 16384 + 1024 + (k % 256 / 64 * 128 + n % 128) * 2, 2);
      ASSERT_EQ(scale, problem.scales[group]);
      ASSERT_EQ(zero, 0x4300 + problem.zeros[group]);
    }
  }
}

}  // namespace
}  // namespace flashquant::cuda
