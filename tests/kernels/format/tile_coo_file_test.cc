// The stand-alone file: round trip, and what any damage to it does. Changed headers get their
// checksum mended where the rule behind it is meant.
#include "kernels/format/tile_coo_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/crc32c.h"
#include "tests/kernels/format/tile_coo_test_data.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;

using Bytes = std::vector<uint8_t>;

constexpr size_t kHeaderBytes = 256;

TileCooGeometry SmallGeometry() {
  TileCooGeometry geometry;
  geometry.k = 150;
  geometry.n = 70;
  geometry.tile_k = 128;
  geometry.tile_n = 64;
  return geometry;
}

struct EncodedFile {
  std::vector<TileCooSlot> slots;
  TileCooSlotCounts counts;
  Bytes bytes;
};

EncodedFile MakeFile(const TileCooGeometry& geometry, double density, uint64_t seed,
                     uint64_t dense_hash = 0) {
  std::mt19937_64 random(seed);
  EncodedFile file;
  file.slots = RandomSlots(geometry, density, random);
  auto encoded = EncodeTileCoo(geometry, file.slots);
  EXPECT_TRUE(encoded.ok()) << encoded.status();
  file.counts = encoded->counts;
  const auto matrix = TileCooMatrix::Create(geometry, std::move(encoded->arrays));
  EXPECT_TRUE(matrix.ok()) << matrix.status();
  auto bytes = SerializeTileCooFile(*matrix, encoded->counts, dense_hash);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  file.bytes = *std::move(bytes);
  return file;
}

template <typename T>
void Put(Bytes& bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}
template <typename T>
T Get(const Bytes& bytes, size_t offset) {
  T value{};
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

void MendHeaderCrc(Bytes& bytes) {
  Put<uint32_t>(bytes, 140, 0);
  Put<uint32_t>(bytes, 140, Crc32c(bytes.data(), kHeaderBytes));
}

// Parses after writing `value` at `offset` of the header, its checksum mended.
template <typename T>
absl::StatusOr<TileCooFile> ParseWith(Bytes bytes, size_t offset, T value) {
  Put(bytes, offset, value);
  MendHeaderCrc(bytes);
  return ParseTileCooFile(bytes);
}

TEST(TileCooFileTest, RandomMatricesComeBackUnchanged) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    TileCooGeometry geometry;
    geometry.k = 1 + static_cast<int64_t>(seed * 37 % 500);
    geometry.n = 1 + static_cast<int64_t>(seed * 53 % 300);
    geometry.tile_k = 64 << (seed % 3);
    geometry.tile_n = 64 << (seed / 3 % 3);
    geometry.buckets_per_tile = 8 << (seed % 4);
    geometry.value_type = static_cast<TileCooValueType>(seed % 2);
    geometry.semantics = static_cast<TileCooSemantics>(seed / 2 % 2);
    geometry.order_hint = static_cast<TileCooOrderHint>(seed % 3);
    const EncodedFile made = MakeFile(geometry, 0.04, seed, seed * 1000003);
    const auto file = ParseTileCooFile(made.bytes);
    ASSERT_TRUE(file.ok()) << file.status();
    const TileCooGeometry& read = file->matrix.geometry();
    EXPECT_EQ(read.k, geometry.k);
    EXPECT_EQ(read.n, geometry.n);
    EXPECT_EQ(read.value_type, geometry.value_type);
    EXPECT_EQ(read.semantics, geometry.semantics);
    EXPECT_EQ(read.order_hint, geometry.order_hint);
    EXPECT_EQ(file->header.counts, made.counts);
    EXPECT_EQ(file->header.dense_hash, seed * 1000003);
    std::set<std::tuple<int64_t, int64_t, uint16_t>> stored;
    file->matrix.ForEachSlot(
        [&](int64_t k, int64_t n, uint16_t bits) { stored.emplace(k, n, bits); });
    std::set<std::tuple<int64_t, int64_t, uint16_t>> expected;
    for (const TileCooSlot& slot : made.slots) expected.emplace(slot.k, slot.n, slot.value_bits);
    EXPECT_EQ(stored, expected);
    const auto again =
        SerializeTileCooFile(file->matrix, file->header.counts, file->header.dense_hash);
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(*again, made.bytes);
  }
}

TEST(TileCooFileTest, EveryChangeOfEveryHeaderByteIsRefused) {
  const Bytes good = MakeFile(SmallGeometry(), 0.03, 1).bytes;
  for (size_t offset = 0; offset < kHeaderBytes; ++offset) {
    for (int change = 1; change < 256; ++change) {
      Bytes bad = good;
      bad[offset] = static_cast<uint8_t>(bad[offset] ^ change);
      ASSERT_FALSE(ParseTileCooFile(bad).ok()) << "byte " << offset << " xor " << change;
    }
  }
}

TEST(TileCooFileTest, EveryChangedBitBehindTheHeaderIsRefused) {
  const Bytes good = MakeFile(SmallGeometry(), 0.03, 2).bytes;
  for (size_t offset = kHeaderBytes; offset < good.size(); ++offset) {
    for (int bit = 0; bit < 8; ++bit) {
      Bytes bad = good;
      bad[offset] = static_cast<uint8_t>(bad[offset] ^ (1 << bit));
      ASSERT_FALSE(ParseTileCooFile(bad).ok()) << "byte " << offset << " bit " << bit;
    }
  }
}

// With the checksum mended only fields that describe, not locate, may take another value: minor
// version, value type, semantics, the two other known order hints, ignorable flags, dense_hash;
// column mode 0 also accepts shared columns; and K and N, as far as tiles and slots still fit.
TEST(TileCooFileTest, ChangedHeaderByteWithMendedChecksumIsRefusedOrDescribesOnly) {
  const Bytes good = MakeFile(SmallGeometry(), 0.03, 3).bytes;
  std::set<size_t> accepted;
  for (size_t offset = 0; offset < kHeaderBytes; ++offset) {
    if (offset >= 140 && offset < 144) continue;  // the checksum itself
    for (int change = 1; change < 256; ++change) {
      const auto value = static_cast<uint8_t>(good[offset] ^ change);
      const auto file = ParseWith(good, offset, value);
      if (file.ok()) accepted.insert(offset);
    }
  }
  EXPECT_EQ(accepted, (std::set<size_t>{10, 11, 16, 24, 40, 41, 43, 46, 47, 128, 129, 130, 131, 132,
                                        133, 134, 135}));
}

TEST(TileCooFileTest, EveryTruncationAndAnAppendedByteAreRefused) {
  const Bytes good = MakeFile(SmallGeometry(), 0.03, 4).bytes;
  for (size_t num_bytes = 0; num_bytes < good.size(); ++num_bytes) {
    ASSERT_FALSE(ParseTileCooFile(std::span(good).first(num_bytes)).ok()) << num_bytes;
  }
  Bytes longer = good;
  longer.push_back(0);
  EXPECT_THAT(std::string(ParseTileCooFile(longer).status().message()), HasSubstr("file_bytes is"));
}

TEST(TileCooFileTest, HigherMinorIgnoresWhatItMayAndNothingElse) {
  Bytes minor3 = MakeFile(SmallGeometry(), 0.03, 5).bytes;
  const size_t end = minor3.size();
  Put<uint16_t>(minor3, 10, 3);
  minor3[200] = 0xee;
  minor3[43] = 77;
  Put<uint32_t>(minor3, 44, 0xabcd0000u);
  minor3.resize(end + 5, 0x55);
  Put<uint64_t>(minor3, 112, end + 5);
  MendHeaderCrc(minor3);
  const auto file = ParseTileCooFile(minor3);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->matrix.geometry().order_hint, TileCooOrderHint::kNone);
  EXPECT_EQ(file->header.stored_order_hint, 77);

  EXPECT_EQ(ParseWith<uint32_t>(minor3, 44, 0x8000).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_FALSE(ParseWith<uint8_t>(minor3, 40, 2).ok());     // col_mode
  EXPECT_FALSE(ParseWith<uint8_t>(minor3, 42, 1).ok());     // tile_order
  EXPECT_FALSE(ParseWith<uint32_t>(minor3, 12, 512).ok());  // header_bytes
  EXPECT_FALSE(ParseWith<uint64_t>(minor3, 112, end + 4).ok());
  EXPECT_FALSE(ParseWith<uint64_t>(minor3, 112, end - 1).ok());
  EXPECT_FALSE(ParseWith<uint16_t>(minor3, 10, 0).ok());
}

TEST(TileCooFileTest, SlotCountsThatWrapTo64BitsAreRefused) {
  const Bytes good = MakeFile(SmallGeometry(), 0.03, 6).bytes;
  Bytes bad = good;
  const auto real = Get<uint64_t>(good, 56);
  const auto filler = Get<uint64_t>(good, 64);
  Put<uint64_t>(bad, 56, std::numeric_limits<uint64_t>::max());
  Put<uint64_t>(bad, 64, real + filler + 1);
  const auto file = ParseWith<uint8_t>(bad, 0, 0x54);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("slots"));
}

TEST(TileCooFileTest, HugeShapesAreRefusedBySizeAlone) {
  Bytes bytes = MakeFile(SmallGeometry(), 0.0, 7).bytes;
  Put<uint64_t>(bytes, 16, 0x7fffffff);
  Put<uint64_t>(bytes, 24, 0x7fffffff);
  Put<uint32_t>(bytes, 48, (0x7fffffff + 127u) / 128);
  Put<uint32_t>(bytes, 52, (0x7fffffff + 63u) / 64);
  MendHeaderCrc(bytes);
  EXPECT_THAT(std::string(ParseTileCooFile(bytes).status().message()), HasSubstr("layout"));
  EXPECT_FALSE(ParseWith<uint64_t>(bytes, 16, std::numeric_limits<uint64_t>::max()).ok());
}

TEST(TileCooFileTest, CountsThatDoNotFitTheMatrixAreNotWritten) {
  const auto file = ParseTileCooFile(MakeFile(SmallGeometry(), 0.03, 8).bytes);
  ASSERT_TRUE(file.ok());
  const TileCooSlotCounts good = file->header.counts;
  ASSERT_GT(good.null, 0);
  for (const TileCooSlotCounts& bad :
       {TileCooSlotCounts{good.real + 1, good.filler, good.null},
        TileCooSlotCounts{good.real + 1, good.filler, good.null - 1},
        TileCooSlotCounts{good.real, good.filler + 1, good.null - 1},
        TileCooSlotCounts{good.real + good.filler + 1, -1, good.null},
        TileCooSlotCounts{-1, good.real + good.filler + 1, good.null}}) {
    EXPECT_EQ(SerializeTileCooFile(file->matrix, bad, 0).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(TileCooFileTest, DenseHashCoversCodesScalesAndZeros) {
  std::mt19937_64 random(9);
  const TileCooGeometry geometry = SmallGeometry();
  const EncodedFile made = MakeFile(geometry, 0.03, 9);
  const Int4Weight weight = RandomInt4Weight(geometry.k, geometry.n, 64, made.slots, random);
  const auto parsed = ParseTileCooFile(made.bytes);
  ASSERT_TRUE(parsed.ok());
  const uint64_t hash = DenseHash(weight);
  const auto hashed = ParseWith<uint64_t>(made.bytes, 128, hash);
  ASSERT_TRUE(hashed.ok());
  EXPECT_TRUE(ValidateTileCooFileAgainstInt4(*parsed, weight).ok());  // hash 0: unchecked
  EXPECT_TRUE(ValidateTileCooFileAgainstInt4(*hashed, weight).ok());

  Int4Weight other = weight;
  other.scales[0].bits ^= 1;
  EXPECT_TRUE(ValidateTileCooFileAgainstInt4(*parsed, other).ok());
  EXPECT_THAT(std::string(ValidateTileCooFileAgainstInt4(*hashed, other).message()),
              HasSubstr("dense_hash"));
  EXPECT_EQ(DenseHash(other) >> 32, hash >> 32);
  other = weight;
  other.zeros.front() ^= 1;
  EXPECT_NE(DenseHash(other), hash);
  other = weight;
  other.qweight.back() ^= 1;
  EXPECT_NE(DenseHash(other) >> 32, hash >> 32);
  EXPECT_EQ(DenseHash(other) & 0xffffffffu, hash & 0xffffffffu);
}

}  // namespace
}  // namespace flashquant
