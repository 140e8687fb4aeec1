// Tests of the host packer: an independent decoder must find the canonical arrays again in its
// bytes, everything else must be zero, and the bytes may depend on nothing but the arrays.
#include "kernels/cuda/linear_w4a16/pack.h"
#include "kernels/cuda/linear_w4a16/pack_rules.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/bench/linear_problem.h"
#include "tests/kernels/cuda/linear_w4a16/packed_decoder.h"

namespace flashquant::cuda {
namespace {

using bench::FromBf16;
using bench::MakeProblem;
using bench::OutlierLayout;
using bench::Problem;
using bench::ProblemSpec;

constexpr int kThreads = 2;

std::vector<DecodedOutlier> CanonicalOutliers(const Problem& problem) {
  std::vector<DecodedOutlier> out;
  const int64_t tiles_k = (problem.spec.k + problem.spec.tile_k - 1) / problem.spec.tile_k;
  for (size_t t = 0; t + 1 < problem.tile_indptr.size(); ++t) {
    for (size_t r = problem.tile_indptr[t]; r < problem.tile_indptr[t + 1]; ++r) {
      for (size_t s = 0; s < 4; ++s) {
        const uint8_t* record = problem.records.data() + r * 16;
        DecodedOutlier outlier;
        std::memcpy(&outlier.value, record + 8 + 2 * s, 2);
        if (outlier.value == 0) continue;
        outlier.n = static_cast<int64_t>(t) / tiles_k * problem.spec.tile_n + record[4 + s];
        outlier.k = static_cast<int64_t>(t) % tiles_k * problem.spec.tile_k + record[s];
        out.push_back(outlier);
      }
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

void ExpectDensePart(const Problem& problem, const PackedLayout& layout,
                     const PackedDecoder& decoder) {
  const int64_t groups = problem.k_padded / problem.group_size;
  int64_t num_wrong = 0;
  for (int64_t n = 0; n < int64_t{layout.num_strips} * kStripN; ++n) {
    for (int64_t k = 0; k < int64_t{layout.num_units} * kUnitK; ++k) {
      const DecodedWeight found = decoder.At(n, k);
      if (n >= problem.n_padded || k >= problem.k_padded) {
        // Padding channels give 0; activations of padding features are 0, whatever the scale.
        num_wrong += found.code == 8 && (n < problem.n_padded || found.scale == 0) ? 0 : 1;
        continue;
      }
      const auto byte = problem.qweight[static_cast<size_t>(n * (problem.k_padded / 2) + k / 2)];
      const auto group = static_cast<size_t>(n * groups + k / problem.group_size);
      num_wrong += found.code == (k % 2 == 0 ? byte & 0xf : byte >> 4) ? 0 : 1;
      num_wrong += found.scale == problem.scales[group] ? 0 : 1;
      num_wrong += found.zero_point == (problem.zeros.empty() ? 8 : problem.zeros[group]) ? 0 : 1;
    }
  }
  EXPECT_EQ(num_wrong, 0);
}

void ExpectSameMatrix(const Problem& problem, const PackedDecoder& decoder) {
  std::vector<double> found(static_cast<size_t>(problem.spec.n) *
                            static_cast<size_t>(problem.spec.k));
  const auto at = [&](int64_t n, int64_t k) -> double& {
    return found[static_cast<size_t>(n * problem.spec.k + k)];
  };
  for (int64_t n = 0; n < problem.spec.n; ++n) {
    for (int64_t k = 0; k < problem.spec.k; ++k) {
      const DecodedWeight weight = decoder.At(n, k);
      at(n, k) = double{FromBf16(weight.scale)} * (weight.code - weight.zero_point);
    }
  }
  for (const DecodedOutlier& outlier : decoder.Outliers()) {
    ASSERT_LT(outlier.n, problem.spec.n);
    ASSERT_LT(outlier.k, problem.spec.k);
    at(outlier.n, outlier.k) += double{FromBf16(outlier.value)};
  }
  EXPECT_TRUE(found == problem.DenseMatrix());
}

// Offsets, sizes and alignments; records in unit order without gaps.
void ExpectSoundLayout(const PackedLinear& packed, const PackedDecoder& decoder) {
  const PackedLayout& layout = packed.layout;
  EXPECT_EQ(layout.num_bytes, static_cast<int64_t>(packed.bytes.size()));
  EXPECT_EQ(layout.index_offset % 16, 0);
  EXPECT_EQ(layout.outliers_offset % kCopyAlignment, 0);
  int64_t next = 0;
  int64_t most = 0;
  for (int64_t unit = 0; unit < int64_t{layout.num_strips} * layout.num_units; ++unit) {
    const OutlierRef ref = decoder.Ref(unit);
    EXPECT_TRUE(ref.num_16bytes == 0 || ref.offset == next) << "unit " << unit;
    const int64_t end = layout.outliers_offset + (next + ref.num_16bytes) * 16;
    next += (ref.num_16bytes + 7) / 8 * 8;  // multiples of 128 bytes
    for (int64_t i = end; i < layout.outliers_offset + next * 16; ++i) {
      EXPECT_EQ(packed.bytes[static_cast<size_t>(i)], 0) << "behind unit " << unit;
    }
    most = std::max<int64_t>(most, int64_t{ref.num_16bytes} * 16);
  }
  EXPECT_EQ(layout.outliers_offset + next * 16, layout.num_bytes);
  EXPECT_EQ(layout.max_outlier_bytes, most);
}

PackedLinear ExpectRoundTrip(const Problem& problem) {
  SCOPED_TRACE(problem.spec.Name());
  PackedLinear packed = PackLinear(problem.weight(), problem.outliers(), kThreads);
  const PackedDecoder decoder(packed.layout, packed.bytes);
  ExpectDensePart(problem, packed.layout, decoder);
  EXPECT_TRUE(decoder.Outliers() == CanonicalOutliers(problem));
  ExpectSameMatrix(problem, decoder);
  ExpectSoundLayout(packed, decoder);
  EXPECT_TRUE(PackLinear(problem.weight(), problem.outliers(), 1).bytes == packed.bytes)
      << "bytes must not depend on the number of threads";
  return packed;
}

class PackEveryGroupTest : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(PackEveryGroupTest, DecodesToTheCanonicalArrays) {
  const auto [group_size, zero_points] = GetParam();
  for (const auto& [k, n] : {std::pair{512, 64}, {384, 40}, {8, 8}, {264, 104}, {896, 72}}) {
    for (const double density : {0.0, 0.03}) {
      ProblemSpec spec;
      spec.k = k;
      spec.n = n;
      spec.group_size = group_size;
      spec.zero_points = zero_points;
      spec.density = density;
      spec.layout = OutlierLayout::kRaggedRecords;
      ExpectRoundTrip(MakeProblem(spec, kThreads));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(GroupsAndZeroPoints, PackEveryGroupTest,
                         testing::Combine(testing::Values(32, 64, 128, -1), testing::Bool()));

TEST(PackTest, EveryTileSizeOfTileCooGivesTheSameOutliers) {
  for (const int tile_k : {64, 128, 256}) {
    for (const int tile_n : {64, 128, 256}) {
      ProblemSpec spec;
      spec.k = 600;
      spec.n = 328;
      spec.group_size = 64;
      spec.density = 0.05;
      spec.tile_k = tile_k;
      spec.tile_n = tile_n;
      ExpectRoundTrip(MakeProblem(spec, kThreads));
    }
  }
}

TEST(PackTest, UnitsWithoutOutliersHaveNoRecord) {
  ProblemSpec spec;
  spec.k = 1024;
  spec.n = 256;
  spec.density = 0.01;
  spec.layout = OutlierLayout::kEmptyTiles;
  const PackedLinear packed = ExpectRoundTrip(MakeProblem(spec, kThreads));
  const PackedDecoder decoder(packed.layout, packed.bytes);
  EXPECT_EQ(decoder.Ref(0).num_16bytes, 0u);
  EXPECT_GT(decoder.Ref(1).num_16bytes, 0u);
}

TEST(PackTest, ALayerWithoutOutliersEndsAfterItsIndex) {
  ProblemSpec spec;
  spec.k = 300;
  spec.n = 48;
  const PackedLinear packed = ExpectRoundTrip(MakeProblem(spec, kThreads));
  EXPECT_EQ(packed.layout.max_outlier_bytes, 0);
  EXPECT_EQ(packed.layout.num_bytes, packed.layout.outliers_offset);
}

TEST(PackTest, OutliersThatWouldBeTooSmallToStoreAreLeftOut) {
  // BF16 bits; a value is stored times 2^-60, and kept while that is a normal number.
  EXPECT_EQ(StoredOutlier(0x3f80), 0x3f80 - (60 << 7));  // 1
  EXPECT_EQ(StoredOutlier(0xbfc1), 0xbfc1 - (60 << 7));
  EXPECT_EQ(StoredOutlier(61 << 7 | 5), 1 << 7 | 5);  // the smallest exponent that stays
  EXPECT_EQ(StoredOutlier(60 << 7 | 127), 0);
  EXPECT_EQ(StoredOutlier(0x8000 | 60 << 7), 0) << "not -0, which would be a slot";
  EXPECT_EQ(StoredOutlier(0x0001), 0);
  EXPECT_EQ(StoredOutlier(0x7f80), 0x7f80) << "infinity";
  EXPECT_EQ(StoredOutlier(0xffc0), 0xffc0) << "not a number";
}

TEST(PackTest, CrowdedUnitsAreCutIntoPieces) {
  ProblemSpec spec;
  spec.k = 512;
  spec.n = 128;
  spec.density = 0.02;
  spec.layout = OutlierLayout::kHotTile;
  const PackedLinear packed = ExpectRoundTrip(MakeProblem(spec, kThreads));
  EXPECT_GT(packed.layout.max_outlier_bytes, 2 * kMaxPieceBytes);
}

TEST(PackTest, AHotOutputFeatureFillsOneBlockOnly) {
  ProblemSpec spec;
  spec.k = 768;
  spec.n = 96;
  spec.layout = OutlierLayout::kHotColumn;
  spec.density = 0.01;
  const PackedLinear packed = ExpectRoundTrip(MakeProblem(spec, kThreads));
  EXPECT_EQ(packed.layout.max_outlier_bytes, (kUnitK / kSlotsPerQuad + 1) * kQuadBytes);
}

// `count` outliers of a 256 x 32 matrix, with a column per slot, by rising feature; the rest of the
// last record is null.
Problem WithOutliers(int count) {
  ProblemSpec spec;
  spec.k = kUnitK;
  spec.n = kStripN;
  spec.tile_n = 64;
  Problem problem = MakeProblem(spec, kThreads);
  const int num_records = (count + 3) / 4;
  problem.records.assign(static_cast<size_t>(num_records) * 16, 0);
  problem.tile_indptr = {0, static_cast<uint32_t>(num_records)};
  for (int i = 0; i < count; ++i) {
    uint8_t* record = problem.records.data() + i / 4 * 16;
    record[i % 4] = static_cast<uint8_t>(i / kStripN);
    record[4 + i % 4] = static_cast<uint8_t>(i % kStripN);
    const auto value = static_cast<uint16_t>(0x3c00 + i % 1024);
    std::memcpy(record + 8 + 2 * (i % 4), &value, 2);
  }
  return problem;
}

TEST(PackTest, PiecesEndExactlyWhereTheyAreFull) {
  for (const int count : {1, 3, 4, 5, 31, 32, kMaxPieceSlots - 1, kMaxPieceSlots,
                          kMaxPieceSlots + 1, 2 * kMaxPieceSlots, kUnitK * kStripN}) {
    SCOPED_TRACE(count);
    const PackedLinear packed = ExpectRoundTrip(WithOutliers(count));
    const int last = (count - 1) % kMaxPieceSlots + 1;
    const int expected = (count - last) / kMaxPieceSlots * kMaxPieceBytes +
                         ((last + kSlotsPerQuad - 1) / kSlotsPerQuad + 1) * kQuadBytes;
    EXPECT_EQ(packed.layout.max_outlier_bytes, expected);
  }
}

TEST(PackTest, NullSlotsAreDropped) {
  Problem problem = WithOutliers(64);
  for (size_t r = 0; r < 16; r += 2) std::memset(problem.records.data() + r * 16 + 8, 0, 8);
  const PackedLinear packed = ExpectRoundTrip(problem);
  EXPECT_EQ(packed.layout.max_outlier_bytes, (32 / kSlotsPerQuad + 1) * kQuadBytes);
}

TEST(PackTest, RowsOfActivationsAreAPermutationOfTheFeatures) {
  std::vector<uint32_t> rows;
  for (uint32_t feature = 0; feature < kUnitK; ++feature) rows.push_back(XRow(feature));
  std::sort(rows.begin(), rows.end());
  std::vector<uint32_t> all(kUnitK);
  std::iota(all.begin(), all.end(), 0u);
  EXPECT_EQ(rows, all);
}

}  // namespace
}  // namespace flashquant::cuda
