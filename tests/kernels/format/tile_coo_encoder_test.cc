// The encoder on random slots: what goes in comes out, the order is the canonical one (checked
// against a naive restatement of its rules), and bad input is refused.
#include "kernels/format/tile_coo_encoder.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/format/tile_coo_test_data.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;

struct Position {
  int64_t k;
  int64_t n;
  friend auto operator<=>(const Position&, const Position&) = default;
};
using SlotMap = std::map<Position, uint16_t>;

SlotMap ToMap(const std::vector<TileCooSlot>& slots) {
  SlotMap map;
  for (const TileCooSlot& slot : slots) map[{slot.k, slot.n}] = slot.value_bits;
  return map;
}

bool SameArrays(const TileCooArrays& a, const TileCooArrays& b) {
  return a.tile_indptr == b.tile_indptr && a.bucket_info == b.bucket_info && a.records == b.records;
}

TileCooGeometry RandomGeometry(std::mt19937_64& random) {
  TileCooGeometry geometry;
  geometry.tile_k = 64 << (random() % 3);
  geometry.tile_n = 64 << (random() % 3);
  geometry.buckets_per_tile = 8 << (random() % 4);
  geometry.k = 1 + static_cast<int64_t>(random() % 600);
  geometry.n = 1 + static_cast<int64_t>(random() % 300);
  geometry.value_type = static_cast<TileCooValueType>(random() % 2);
  geometry.order_hint = static_cast<TileCooOrderHint>(random() % 3);
  geometry.semantics = static_cast<TileCooSemantics>(random() % 2);
  return geometry;
}

// Row class and number of classes as 8.9 says.
int RowClass(TileCooOrderHint hint, int row) {
  if (hint == TileCooOrderHint::kNone) return 0;
  return hint == TileCooOrderHint::kPaper ? row / 2 % 4 : row % 8;
}
int NumClasses(TileCooOrderHint hint) {
  return hint == TileCooOrderHint::kNone ? 1 : hint == TileCooOrderHint::kPaper ? 4 : 8;
}

// The bucket of each column of a tile, by looking at every allowed bucket for each column.
std::map<int, int> NaiveBuckets(const TileCooGeometry& geometry,
                                const std::map<int, std::map<int, uint16_t>>& columns) {
  std::vector<std::tuple<int, int>> by_load;  // falling load as a negative number, column
  for (const auto& [column, rows] : columns) {
    by_load.emplace_back(-(static_cast<int>(rows.size()) + 3) / 4, column);
  }
  std::sort(by_load.begin(), by_load.end());
  std::vector<int> loads(static_cast<size_t>(geometry.buckets_per_tile), 0);
  std::map<int, int> bucket_of_column;
  for (const auto& [negative_load, column] : by_load) {
    int best = -1;
    for (int b = 0; b < geometry.buckets_per_tile; ++b) {
      if (geometry.order_hint == TileCooOrderHint::kKMajor && b % 8 != column % 8) continue;
      if (best < 0 || loads[static_cast<size_t>(b)] < loads[static_cast<size_t>(best)]) best = b;
    }
    loads[static_cast<size_t>(best)] -= negative_load;
    bucket_of_column[column] = best;
  }
  return bucket_of_column;
}

// All slots of one bucket in canonical order, null ones included, as records.
std::vector<TileCooRecord> NaiveBucketRecords(
    const TileCooGeometry& geometry, int bucket,
    const std::map<int, std::map<int, uint16_t>>& columns_of_bucket) {
  std::vector<TileCooRecord> records;
  int slot_number = 0;
  for (const auto& [column, rows] : columns_of_bucket) {
    std::set<int> left;
    for (const auto& [row, value] : rows) left.insert(row);
    while (!left.empty()) {
      TileCooRecord record;
      for (size_t i = 0; i < 4; ++i, ++slot_number) {
        record.col[i] = static_cast<uint8_t>(column);
        if (left.empty()) {
          record.row[i] = record.row[0];
          continue;
        }
        const int num_classes = NumClasses(geometry.order_hint);
        auto taken = left.end();
        for (int step = 0; step < num_classes && taken == left.end(); ++step) {
          const int wanted = (slot_number + bucket + step) % num_classes;
          taken = std::find_if(left.begin(), left.end(), [&](int row) {
            return RowClass(geometry.order_hint, row) == wanted;
          });
        }
        record.row[i] = static_cast<uint8_t>(*taken);
        record.value[i] = rows.at(*taken);
        left.erase(taken);
      }
      records.push_back(record);
    }
  }
  return records;
}

TileCooArrays NaiveEncode(const TileCooGeometry& geometry, const std::vector<TileCooSlot>& slots) {
  std::map<int64_t, std::map<int, std::map<int, uint16_t>>> tiles;  // tile, column, row
  for (const TileCooSlot& slot : slots) {
    const int64_t tile =
        slot.n / geometry.tile_n * geometry.num_tiles_k() + slot.k / geometry.tile_k;
    tiles[tile][slot.n % geometry.tile_n][slot.k % geometry.tile_k] = slot.value_bits;
  }
  TileCooArrays arrays;
  arrays.tile_indptr.push_back(0);
  for (int64_t tile = 0; tile < geometry.num_tiles(); ++tile) {
    const auto& columns = tiles[tile];
    const std::map<int, int> bucket_of_column = NaiveBuckets(geometry, columns);
    size_t offset = 0;
    for (int b = 0; b < geometry.buckets_per_tile; ++b) {
      std::map<int, std::map<int, uint16_t>> members;
      for (const auto& [column, rows] : columns) {
        if (bucket_of_column.at(column) == b) members[column] = rows;
      }
      const std::vector<TileCooRecord> records = NaiveBucketRecords(geometry, b, members);
      arrays.bucket_info.push_back(
          {static_cast<uint16_t>(offset), static_cast<uint16_t>(records.size())});
      offset += records.size();
      arrays.records.insert(arrays.records.end(), records.begin(), records.end());
    }
    arrays.tile_indptr.push_back(static_cast<uint32_t>(arrays.records.size()));
  }
  return arrays;
}

TEST(TileCooEncoderTest, RandomSlotsComeBackAndKeepTheCanonicalOrder) {
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const TileCooGeometry geometry = RandomGeometry(random);
    const double densities[] = {0.0, 0.002, 0.01, 0.03, 0.3};
    const std::vector<TileCooSlot> slots =
        RandomSlots(geometry, densities[seed % 5], random,
                    seed % 2 == 0 ? -1 : static_cast<int64_t>(random() % 300));
    std::vector<TileCooSlot> shuffled = slots;
    std::shuffle(shuffled.begin(), shuffled.end(), random);

    absl::StatusOr<EncodedTileCoo> encoded = EncodeTileCoo(geometry, shuffled);
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    EXPECT_TRUE(SameArrays(encoded->arrays, NaiveEncode(geometry, slots)));
    const auto num_fillers = static_cast<int64_t>(slots.size() / 5);
    EXPECT_EQ(encoded->counts.filler, num_fillers);
    EXPECT_EQ(encoded->counts.real, static_cast<int64_t>(slots.size()) - num_fillers);

    const auto matrix = TileCooMatrix::Create(geometry, encoded->arrays);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    SlotMap stored;
    int64_t num_stored = 0;
    matrix->ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
      stored[{k, n}] = bits;
      ++num_stored;
    });
    EXPECT_EQ(stored, ToMap(slots));
    EXPECT_EQ(num_stored, static_cast<int64_t>(slots.size()));
    EXPECT_EQ(matrix->num_slots(), num_stored + encoded->counts.null);
  }
}

TEST(TileCooEncoderTest, OrderOfTheInputDoesNotMatter) {
  std::mt19937_64 random(7);
  TileCooGeometry geometry;
  geometry.k = 700;
  geometry.n = 300;
  std::vector<TileCooSlot> slots = RandomSlots(geometry, 0.03, random);
  const auto first = EncodeTileCoo(geometry, slots);
  std::shuffle(slots.begin(), slots.end(), random);
  const auto second = EncodeTileCoo(geometry, slots);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_TRUE(SameArrays(first->arrays, second->arrays));
}

TEST(TileCooEncoderTest, TilesEncodedApartJoinToTheWhole) {
  std::mt19937_64 random(11);
  TileCooGeometry geometry;
  geometry.k = 600;
  geometry.n = 200;
  geometry.buckets_per_tile = 16;
  const std::vector<TileCooSlot> slots = RandomSlots(geometry, 0.05, random);
  auto encoder = TileCooTileEncoder::Create(geometry);
  ASSERT_TRUE(encoder.ok());
  TileCooArrays joined;
  joined.tile_indptr.push_back(0);
  for (int64_t tile = 0; tile < geometry.num_tiles(); ++tile) {
    const int64_t k0 = tile % geometry.num_tiles_k() * geometry.tile_k;
    const int64_t n0 = tile / geometry.num_tiles_k() * geometry.tile_n;
    std::vector<TileCooTileSlot> inside;
    for (const TileCooSlot& slot : slots) {
      if (slot.k < k0 || slot.k >= k0 + geometry.tile_k) continue;
      if (slot.n < n0 || slot.n >= n0 + geometry.tile_n) continue;
      inside.push_back(
          {static_cast<uint8_t>(slot.k - k0), static_cast<uint8_t>(slot.n - n0), slot.value_bits});
    }
    ASSERT_TRUE(encoder->Encode(inside, joined.bucket_info, joined.records).ok());
    joined.tile_indptr.push_back(static_cast<uint32_t>(joined.records.size()));
  }
  const auto whole = EncodeTileCoo(geometry, slots);
  ASSERT_TRUE(whole.ok());
  EXPECT_TRUE(SameArrays(joined, whole->arrays));
}

TEST(TileCooEncoderTest, FullTileOf256By256FitsThe16BitCounts) {
  std::mt19937_64 random(3);
  TileCooGeometry geometry;
  geometry.k = 256;
  geometry.n = 256;
  geometry.tile_n = 256;
  geometry.buckets_per_tile = 8;
  auto encoded = EncodeTileCoo(geometry, RandomSlots(geometry, 1.0, random));
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  EXPECT_EQ(encoded->arrays.records.size(), 16384u);
  EXPECT_EQ(encoded->counts.null, 0);
  EXPECT_EQ(encoded->arrays.bucket_info.back().offset, 14336);
  EXPECT_EQ(encoded->arrays.bucket_info.back().count, 2048);
  EXPECT_TRUE(TileCooMatrix::Create(geometry, std::move(encoded->arrays)).ok());
}

TEST(TileCooEncoderTest, NoSlotsGiveEmptyTilesAndNoRecords) {
  TileCooGeometry geometry;
  geometry.k = 513;
  geometry.n = 129;
  const auto encoded = EncodeTileCoo(geometry, {});
  ASSERT_TRUE(encoded.ok());
  EXPECT_EQ(encoded->arrays.tile_indptr, std::vector<uint32_t>(7, 0));
  EXPECT_TRUE(encoded->arrays.records.empty());
  EXPECT_EQ(encoded->counts, TileCooSlotCounts{});
}

std::string EncodeError(const TileCooGeometry& geometry, const std::vector<TileCooSlot>& slots) {
  const absl::Status status = EncodeTileCoo(geometry, slots).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(TileCooEncoderTest, BadSlotsAreRefusedWithTheirPlace) {
  TileCooGeometry geometry;
  geometry.k = 300;
  geometry.n = 100;
  constexpr uint16_t kOne = 0x3f80;
  EXPECT_THAT(EncodeError(geometry, {{300, 0, kOne}}), HasSubstr("slot at k 300 n 0 outside"));
  EXPECT_THAT(EncodeError(geometry, {{-1, 0, kOne}}), HasSubstr("outside K 300 N 100"));
  EXPECT_THAT(EncodeError(geometry, {{0, 100, kOne}}), HasSubstr("slot at k 0 n 100 outside"));
  EXPECT_THAT(EncodeError(geometry, {{0, -1, kOne}}), HasSubstr("slot at k 0 n -1 outside"));
  EXPECT_THAT(EncodeError(geometry, {{290, 5, kOne}, {1, 1, kOne}, {290, 5, 0x4000}}),
              HasSubstr("tile 1: row 34 column 5 of the tile given twice"));
  for (const uint16_t bits :
       std::initializer_list<uint16_t>{0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0}) {
    EXPECT_THAT(EncodeError(geometry, {{2, 3, bits}}), HasSubstr("row 2 column 3")) << bits;
  }
  geometry.value_type = TileCooValueType::kHalf;
  EXPECT_THAT(EncodeError(geometry, {{2, 3, 0x7c00}}), HasSubstr("is zero or not finite"));
}

TEST(TileCooEncoderTest, BadGeometryIsRefused) {
  TileCooGeometry geometry;
  geometry.k = 300;
  geometry.n = 100;
  geometry.column_mode = TileCooColumnMode::kPerSlot;
  EXPECT_THAT(EncodeError(geometry, {}), HasSubstr("shared columns only"));
  geometry.column_mode = TileCooColumnMode::kShared;
  geometry.tile_k = 96;
  EXPECT_THAT(EncodeError(geometry, {}), HasSubstr("tile_k is 96"));
}

TEST(TileCooEncoderTest, MoreTilesThanMemoryCouldHoldAreRefusedBeforeAllocating) {
  TileCooGeometry geometry;
  geometry.k = (int64_t{1} << 31) - 1;
  geometry.n = (int64_t{1} << 31) - 1;
  EXPECT_EQ(EncodeTileCoo(geometry, {}).status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace flashquant
