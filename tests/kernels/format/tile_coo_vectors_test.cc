// Every file of tests/data/tile_coo_vectors: valid ones are accepted alone and with their INT4
// tensors, give the stated numbers, dense matrix and product, and are rebuilt byte for byte when
// canonical; invalid ones are refused, by the rule that they break.
//
// The files come from a separate implementation of the format text (README.md beside them).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/math_util.h"
#include "kernels/format/tile_coo_decoder.h"
#include "kernels/format/tile_coo_encoder.h"
#include "kernels/format/tile_coo_file.h"
#include "kernels/format/tile_coo_statistics.h"
#include "nlohmann/json.hpp"

namespace flashquant {
namespace {

using ::nlohmann::json;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::Eq;

const std::filesystem::path kFolder = "tests/data/tile_coo_vectors";

std::vector<uint8_t> ReadBytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
std::vector<T> ReadArray(const std::filesystem::path& path) {
  const std::vector<uint8_t> bytes = ReadBytes(path);
  std::vector<T> array(bytes.size() / sizeof(T));
  std::memcpy(array.data(), bytes.data(), array.size() * sizeof(T));
  return array;
}

struct VectorCase {
  std::filesystem::path folder;
  json info;

  std::vector<uint8_t> FileBytes() const {
    return ReadBytes(folder / info["file"].get<std::string>());
  }
  template <typename T>
  std::vector<T> Array(const std::string& name) const {
    return ReadArray<T>(folder / info["arrays"][name]["file"].get<std::string>());
  }
  Int4Weight ReadInt4(int64_t k, int64_t n) const {
    Int4Weight weight;
    weight.n = n;
    weight.k = k;
    weight.n_padded = info["arrays"]["qweight"]["shape"][0];
    weight.k_padded = info["arrays"]["qweight"]["shape"][1].get<int64_t>() * 2;
    const int64_t group_size = info["quantization"]["group_size"];
    weight.group_size = group_size == -1 ? weight.k_padded : group_size;
    weight.symmetric = info["quantization"]["symmetric"];
    weight.qweight = Array<uint8_t>("qweight");
    weight.scales = Array<BFloat16>("scales");
    if (!weight.symmetric) weight.zeros = Array<uint8_t>("zeros");
    return weight;
  }
};

std::vector<VectorCase> ReadCases(const std::string& kind) {
  std::vector<VectorCase> cases;
  std::error_code error;  // a missing folder gives no cases, and EveryRuleHasAnInvalidFile fails
  for (const auto& entry : std::filesystem::directory_iterator(kFolder / kind, error)) {
    if (entry.path().extension() != ".json") continue;
    std::ifstream file(entry.path());
    cases.push_back({kFolder / kind, json::parse(file)});
  }
  std::sort(cases.begin(), cases.end(), [](const VectorCase& a, const VectorCase& b) {
    return a.info["name"] < b.info["name"];
  });
  return cases;
}

std::string CaseName(const ::testing::TestParamInfo<VectorCase>& info) {
  return info.param.info["name"];
}
void PrintTo(const VectorCase& vector_case, std::ostream* out) {
  *out << vector_case.info["what"].get<std::string>();
}

uint64_t Hex(const json& text) { return std::stoull(text.get<std::string>(), nullptr, 16); }

class ValidVectorTest : public ::testing::TestWithParam<VectorCase> {
 protected:
  void SetUp() override {
    bytes_ = GetParam().FileBytes();
    absl::StatusOr<TileCooFile> file = ParseTileCooFile(bytes_);
    ASSERT_TRUE(file.ok()) << file.status();
    file_.emplace(*std::move(file));
  }
  const json& info() const { return GetParam().info; }
  const TileCooMatrix& matrix() const { return file_->matrix; }
  Int4Weight ReadInt4() const {
    return GetParam().ReadInt4(matrix().geometry().k, matrix().geometry().n);
  }

  std::vector<uint8_t> bytes_;
  std::optional<TileCooFile> file_;
};

TEST_P(ValidVectorTest, HeaderHoldsTheStatedNumbers) {
  const TileCooGeometry& geometry = matrix().geometry();
  EXPECT_EQ(geometry.k, info()["K"]);
  EXPECT_EQ(geometry.n, info()["N"]);
  EXPECT_EQ(geometry.tile_k, info()["tile_k"]);
  EXPECT_EQ(geometry.tile_n, info()["tile_n"]);
  EXPECT_EQ(geometry.buckets_per_tile, info()["buckets_per_tile"]);
  EXPECT_EQ(geometry.value_type == TileCooValueType::kHalf ? "fp16" : "bf16", info()["value_type"]);
  EXPECT_EQ(static_cast<int>(geometry.column_mode), info()["col_mode"]);
  EXPECT_EQ(geometry.semantics == TileCooSemantics::kReplace ? "replace" : "residual",
            info()["semantics"]);
  const TileCooFileHeader& header = file_->header;
  EXPECT_EQ(header.stored_order_hint, info()["order_hint"]);
  EXPECT_EQ(header.version_minor, info()["version_minor"]);
  EXPECT_EQ(header.counts.real, info()["real_slots"]);
  EXPECT_EQ(header.counts.filler, info()["filler_slots"]);
  EXPECT_EQ(header.counts.null, info()["null_slots"]);
  EXPECT_EQ(header.num_records, info()["n_groups"]);
  EXPECT_EQ(header.max_tile_records, info()["max_tile_groups"]);
  EXPECT_EQ(header.max_bucket_records, info()["max_bucket_groups"]);
  EXPECT_EQ(header.dense_hash, Hex(info()["dense_hash"]));
  EXPECT_EQ(header.arrays_crc32c, Hex(info()["arrays_crc32c"]));
  EXPECT_EQ(header.header_crc32c, Hex(info()["header_crc32c"]));
  EXPECT_EQ(header.file_bytes, bytes_.size());
  EXPECT_NEAR(matrix().stored_density(), info()["stored_density"].get<double>(), 5e-7);
  const std::vector<uint32_t>& indptr = matrix().arrays().tile_indptr;
  const json& tiles = info()["groups_of_tiles"];
  ASSERT_EQ(indptr.size(), tiles.size() + 1);
  for (size_t t = 0; t < tiles.size(); ++t) EXPECT_EQ(indptr[t + 1] - indptr[t], tiles[t]);
}

TEST_P(ValidVectorTest, IsAcceptedTogetherWithItsInt4Tensors) {
  const Int4Weight weight = ReadInt4();
  EXPECT_EQ(weight.k_padded, info()["quantization"]["K_padded"]);
  EXPECT_EQ(weight.n_padded, info()["quantization"]["N_padded"]);
  const absl::Status status = ValidateTileCooFileAgainstInt4(*file_, weight);
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ValidVectorTest, DecodesToTheStatedDenseMatrix) {
  const Int4Weight weight = ReadInt4();
  const auto decoded = DecodeWeight(weight, &matrix());
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const std::vector<float> expected = GetParam().Array<float>("dense");
  ASSERT_TRUE(info()["dense_is_exact"].get<bool>());
  ASSERT_EQ(decoded->size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ((*decoded)[i], static_cast<double>(expected[i])) << "element " << i;
  }
}

TEST_P(ValidVectorTest, ProductIsTheStatedOne) {
  const auto dense = DecodeWeight(ReadInt4(), &matrix());
  ASSERT_TRUE(dense.ok()) << dense.status();
  const auto k_size = static_cast<size_t>(matrix().geometry().k);
  const auto n_size = static_cast<size_t>(matrix().geometry().n);
  const std::vector<BFloat16> x = GetParam().Array<BFloat16>("x");
  const std::vector<double> expected = GetParam().Array<double>("y");
  const bool exact = info()["y_is_exact"];
  ASSERT_EQ(x.size(), 3 * k_size);
  ASSERT_EQ(expected.size(), 3 * n_size);
  for (size_t m = 0; m < 3; ++m) {
    for (size_t n = 0; n < n_size; ++n) {
      double sum = 0.0;
      double magnitude = 0.0;
      for (size_t k = 0; k < k_size; ++k) {
        const double product =
            static_cast<double>(ToFloat(x[m * k_size + k])) * (*dense)[k * n_size + n];
        sum += product;
        magnitude += std::abs(product);
      }
      const double allowed = exact ? 0.0 : 1e-12 * magnitude;
      ASSERT_LE(std::abs(sum - expected[m * n_size + n]), allowed) << "row " << m << " n " << n;
    }
  }
}

// The encoder sees the slots in an order that has nothing to do with the stored one.
class CanonicalVectorTest : public ValidVectorTest {};

TEST_P(CanonicalVectorTest, FileIsRebuiltByteForByte) {
  std::vector<TileCooSlot> slots;
  matrix().ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
    slots.push_back({static_cast<int32_t>(k), static_cast<int32_t>(n), bits, false});
  });
  std::sort(slots.begin(), slots.end(), [](const TileCooSlot& a, const TileCooSlot& b) {
    return a.value_bits != b.value_bits ? a.value_bits < b.value_bits
                                        : std::pair(b.k, b.n) < std::pair(a.k, a.n);
  });
  absl::StatusOr<EncodedTileCoo> encoded = EncodeTileCoo(matrix().geometry(), slots);
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  EXPECT_EQ(encoded->counts.null, file_->header.counts.null);
  const auto rebuilt = TileCooMatrix::Create(matrix().geometry(), std::move(encoded->arrays));
  ASSERT_TRUE(rebuilt.ok()) << rebuilt.status();
  const auto bytes = SerializeTileCooFile(*rebuilt, file_->header.counts, file_->header.dense_hash);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(*bytes, bytes_);
}

TEST_P(ValidVectorTest, DenseHashIsThatOfTheInt4Tensors) {
  const uint64_t stated = Hex(info()["dense_hash"]);
  const uint64_t computed = DenseHash(ReadInt4());
  EXPECT_NE(computed, 0u);
  EXPECT_THAT(stated, AnyOf(Eq(0u), Eq(computed)));  // 0: the file leaves it unchecked
}

TEST_P(ValidVectorTest, PaperStorageFormulaGivesTheBytesOfTheArrays) {
  const TileCooArrays& arrays = matrix().arrays();
  const size_t array_bytes = arrays.tile_indptr.size() * sizeof(uint32_t) +
                             arrays.bucket_info.size() * sizeof(TileCooBucket) +
                             arrays.records.size() * sizeof(TileCooRecord);
  EXPECT_EQ(static_cast<size_t>(PaperStorageBytes(matrix())), array_bytes);
  // From the stated numbers alone, and as a lower bound of the file's real size.
  const auto num_tiles = static_cast<int64_t>(info()["groups_of_tiles"].size());
  const int64_t num_slots = info()["real_slots"].get<int64_t>() +
                            info()["filler_slots"].get<int64_t>() +
                            info()["null_slots"].get<int64_t>();
  EXPECT_EQ(PaperStorageBytes(num_tiles, info()["buckets_per_tile"], num_slots),
            PaperStorageBytes(matrix()));
  const auto overhead = static_cast<int64_t>(bytes_.size()) - PaperStorageBytes(matrix());
  EXPECT_GE(overhead, 256 + 128);            // header and tail padding
  EXPECT_LT(overhead, 256 + 128 + 2 * 256);  // and two alignment gaps at most
}

INSTANTIATE_TEST_SUITE_P(Vectors, ValidVectorTest, ::testing::ValuesIn(ReadCases("valid")),
                         CaseName);

std::vector<VectorCase> CanonicalCases() {
  std::vector<VectorCase> cases = ReadCases("valid");
  std::erase_if(cases, [](const VectorCase& c) { return !c.info["canonical_order"].get<bool>(); });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Vectors, CanonicalVectorTest, ::testing::ValuesIn(CanonicalCases()),
                         CaseName);

// What our message says for each rule of the README's table.
const std::map<std::string, std::string>& MessageOfRule() {
  static const auto* const kMessages = new std::map<std::string, std::string>{
      {"size", "the header needs 256"},
      {"magic", "magic"},
      {"version", "version major 2"},
      {"header_crc", "header: CRC-32C"},
      {"header_bytes", "header_bytes is"},
      {"reserved", "reserved byte"},
      {"flags", "must-understand flags"},
      {"dims", "K is 0, allowed 1"},
      {"tile_size", "tile_[kn] is [0-9]+, allowed 64, 128, 256"},
      {"buckets", "buckets_per_tile is 24"},
      {"group_size", "group_size is 8"},
      {"value_type", "value_type is 2"},
      {"col_mode", "col_mode is 2"},
      {"semantics", "semantics is 2"},
      {"tile_order", "tile_order is 1"},
      {"order_hint", "order_hint is 3"},
      {"n_tiles", "tiles, K [0-9]+ and N [0-9]+ need"},
      {"group_limit", "n_groups is [0-9]+ .limit 4294967295"},
      {"slot_sum", "real [0-9]+ . filler [0-9]+ . null [0-9]+ slots"},
      {"layout", "layout has arrays at"},
      {"file_bytes", "file_bytes is"},
      {"arrays_crc", "arrays: CRC-32C"},
      {"gaps", "gap: byte"},
      {"tail_padding", "tail padding: byte"},
      {"indptr", "tile_indptr (starts|falls|ends)"},
      {"tile_limit", "tile 0: 1025 records .limit 1024"},
      {"bucket_info", "(counts before it sum|bucket counts sum|ends at record)"},
      {"maxima", "max groups in a (tile|bucket) is"},
      {"row", "tile [0-9]+ bucket [0-9]+: row [0-9]+ outside the tile"},
      {"column", "tile [0-9]+ bucket [0-9]+: column [0-9]+ outside the tile"},
      {"shared_column", "shared column mode"},
      {"column_bucket", "also occurs in bucket"},
      {"duplicate", "stored twice"},
      {"finite", "value 0x[0-9a-f]+ .* is not finite"},
      {"negative_zero", "value -0"},
      {"null_count", "null slots, the arrays have"},
      {"dense_scale", "int4: .*scale .* is not finite"},
      {"dense_zero", "int4: .*zero point [0-9]+ .limit 15"},
      {"dense_hash", "dense_hash"},
      {"zero_point", "is not the zero point"},
  };
  return *kMessages;
}

class InvalidVectorTest : public ::testing::TestWithParam<VectorCase> {};

TEST_P(InvalidVectorTest, IsRefusedByTheRuleThatItBreaks) {
  const json& info = GetParam().info;
  const std::vector<uint8_t> bytes = GetParam().FileBytes();
  const absl::StatusOr<TileCooFile> file = ParseTileCooFile(bytes);
  absl::Status status = file.status();
  if (info.contains("arrays")) {
    ASSERT_TRUE(file.ok()) << file.status();
    const TileCooGeometry& geometry = file->matrix.geometry();
    status = ValidateTileCooFileAgainstInt4(*file, GetParam().ReadInt4(geometry.k, geometry.n));
  }
  ASSERT_FALSE(status.ok()) << info["what"];
  const std::string rule = info["rule"]["id"];
  ASSERT_TRUE(MessageOfRule().contains(rule)) << rule;
  EXPECT_THAT(std::string(status.message()), ContainsRegex(MessageOfRule().at(rule)));
  const bool unsupported = rule == "version" || rule == "flags";
  EXPECT_EQ(status.code(),
            unsupported ? absl::StatusCode::kUnimplemented : absl::StatusCode::kDataLoss);
  RecordProperty("rule", rule);
  RecordProperty("refused_with", std::string(status.message()));
}

INSTANTIATE_TEST_SUITE_P(Vectors, InvalidVectorTest, ::testing::ValuesIn(ReadCases("invalid")),
                         CaseName);

TEST(TileCooVectorsTest, EveryRuleHasAnInvalidFile) {
  std::map<std::string, int> cases_of_rule;
  for (const VectorCase& invalid : ReadCases("invalid")) {
    ++cases_of_rule[invalid.info["rule"]["id"].get<std::string>()];
  }
  for (const auto& [rule, message] : MessageOfRule()) EXPECT_GE(cases_of_rule[rule], 1) << rule;
  EXPECT_EQ(ReadCases("valid").size(), 19u);
  EXPECT_EQ(ReadCases("invalid").size(), 48u);
}

}  // namespace
}  // namespace flashquant
