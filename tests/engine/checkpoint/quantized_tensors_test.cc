// Quantized layers: the section of config.json, and a written layer read back or refused.
#include "engine/checkpoint/quantized_tensors.h"

#include <algorithm>
#include <map>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "kernels/base/crc32c.h"
#include "kernels/format/tile_coo.h"
#include "tests/engine/checkpoint/test_files.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;
using Json = nlohmann::json;

auto IsDataLoss(const std::string& text) {
  return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(text));
}

Json GoodSection() {
  return {{"quant_method", "flashquant"},
          {"format_version", "1.0"},
          {"bits", 4},
          {"group_size", 32},
          {"symmetric", false},
          {"tile_k", 64},
          {"tile_n", 64},
          {"buckets_per_tile", 8},
          {"semantics", "replace"},
          {"order_hint", 2},
          {"method", "rtn"},
          {"target_density", 0.01},
          {"stored_density", 0.0104}};
}

absl::StatusOr<std::optional<QuantizationConfig>> ParseWith(const char* key, const Json& value) {
  Json section = GoodSection();
  section[key] = value;
  return ParseQuantizationConfig({{"quantization_config", section}});
}

TEST(QuantizationConfigTest, IsAbsentWithoutItsSection) {
  const auto config = ParseQuantizationConfig({{"hidden_size", 4}});
  FQ_ASSERT_OK(config);
  EXPECT_FALSE(config->has_value());
}

TEST(QuantizationConfigTest, ReadsEveryMemberAndWritesTheSameBack) {
  Json section = GoodSection();
  section["true_shapes"] = {{"p", {60, 70}}};
  const auto config = ParseQuantizationConfig({{"quantization_config", section}});
  FQ_ASSERT_OK(config);
  EXPECT_EQ((*config)->group_size, 32);
  EXPECT_FALSE((*config)->symmetric);
  EXPECT_EQ((*config)->geometry.tile_k, 64);
  EXPECT_EQ((*config)->geometry.tile_n, 64);
  EXPECT_EQ((*config)->geometry.buckets_per_tile, 8);
  EXPECT_EQ((*config)->geometry.semantics, TileCooSemantics::kReplace);
  EXPECT_EQ((*config)->geometry.order_hint, TileCooOrderHint::kKMajor);
  EXPECT_EQ((*config)->method, "rtn");
  EXPECT_EQ((*config)->stored_density, 0.0104);
  EXPECT_EQ(QuantizationConfigJson(**config), section);
}

// M3
TEST(QuantizationConfigTest, OtherMethodsAndVersionsAreUnimplemented) {
  EXPECT_THAT(ParseWith("quant_method", "gptq"),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("quant_method")));
  for (const char* version : {"0.9", "2.0", "1", "", "1.", ".1", "1.0.0", "1.x", "99999.0"}) {
    EXPECT_THAT(ParseWith("format_version", version),
                StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("unsupported version")))
        << version;
  }
  FQ_EXPECT_OK(ParseWith("format_version", "1.7"));
}

// M13
TEST(QuantizationConfigTest, GroupSizeMustBeKnownAndDivideTheTile) {
  for (const int group_size : {0, 16, 33, 128, -2, 1 << 30}) {
    EXPECT_THAT(ParseWith("group_size", group_size), IsDataLoss("group_size")) << group_size;
  }
  FQ_EXPECT_OK(ParseWith("group_size", -1));
  FQ_EXPECT_OK(ParseWith("group_size", 64));
}

TEST(QuantizationConfigTest, MembersOutOfRangeAreNamed) {
  EXPECT_THAT(ParseWith("bits", 3), IsDataLoss("bits: out of range"));
  EXPECT_THAT(ParseWith("tile_k", 96), IsDataLoss("tile_k"));
  EXPECT_THAT(ParseWith("tile_n", 512), IsDataLoss("tile_n"));
  EXPECT_THAT(ParseWith("buckets_per_tile", 5), IsDataLoss("buckets_per_tile"));
  EXPECT_THAT(ParseWith("semantics", "add"), IsDataLoss("semantics"));
  EXPECT_THAT(ParseWith("order_hint", 3), IsDataLoss("order_hint"));
  EXPECT_THAT(ParseWith("symmetric", 1), IsDataLoss("symmetric"));
  EXPECT_THAT(ParseWith("stored_density", 1.5), IsDataLoss("stored_density"));
  EXPECT_THAT(ParseWith("true_shapes", {{"p", {0, 4}}}), IsDataLoss("true_shapes: p"));
  EXPECT_THAT(ParseWith("true_shapes", {{"p", {4}}}), IsDataLoss("true_shapes: p"));
  EXPECT_THAT(ParseQuantizationConfig({{"quantization_config", 4}}), IsDataLoss("an object"));
}

// A layer of N x K with zero point 3 and one outlier at (k, n) = (5, 9), column mode shared.
struct Layer {
  Int4Weight weight;
  TileCooArrays arrays;
};

constexpr int64_t kN = 20;  // padded to 24
constexpr int64_t kK = 70;  // padded to 96, two tiles of 64 rows

Layer MakeLayer() {
  Layer layer;
  Int4Weight& weight = layer.weight;
  weight.n = kN;
  weight.k = kK;
  weight.n_padded = 24;
  weight.k_padded = 96;
  weight.group_size = 32;
  weight.qweight.assign(24 * 48, 0x33);
  weight.scales.assign(24 * 3, ToBFloat16(0.25f));
  weight.zeros.assign(24 * 3, 3);
  for (size_t i = 20 * 3; i < 24 * 3; ++i) weight.scales[i] = BFloat16{0};
  weight.qweight[0] = 0x9a;  // (n, k) = (0, 0), (0, 1)
  // Two tiles, eight buckets each; the record is in tile 0, bucket 1 (9 % 8).
  layer.arrays.tile_indptr = {0, 1, 1};
  layer.arrays.bucket_info.assign(16, {0, 0});
  layer.arrays.bucket_info[1] = {0, 1};
  for (size_t b = 2; b < 8; ++b) layer.arrays.bucket_info[b] = {1, 0};
  TileCooRecord record;
  record.row = {5, 5, 5, 5};
  record.col = {9, 9, 9, 9};
  record.value = {0x4120, 0, 0, 0};  // 10.0
  layer.arrays.records = {record};
  return layer;
}

// Serves tensors from memory with right checksums, so that one rule at a time can be broken.
class MemoryTensors final : public TensorSource {
 public:
  template <typename Element>
  void Set(const std::string& name, DType dtype, std::vector<int64_t> shape,
           const std::vector<Element>& elements) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(elements.data());
    SetBytes(name, dtype, std::move(shape),
             std::vector<uint8_t>(bytes, bytes + elements.size() * sizeof(Element)));
  }
  void SetBytes(const std::string& name, DType dtype, std::vector<int64_t> shape,
                std::vector<uint8_t> bytes) {
    Erase(name);
    infos_.push_back({name, dtype, std::move(shape), static_cast<int64_t>(bytes.size())});
    std::sort(infos_.begin(), infos_.end(),
              [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
    bytes_[name] = std::move(bytes);
  }
  void Erase(const std::string& name) {
    std::erase_if(infos_, [&](const TensorInfo& info) { return info.name == name; });
  }
  void SetWeight(const Int4Weight& weight) {
    Set("p.qweight", DType::kU8, {weight.n_padded, weight.k_padded / 2}, weight.qweight);
    Set("p.scales", DType::kBF16, {weight.n_padded, weight.groups_per_row()}, weight.scales);
    Set("p.zeros", DType::kU8, {weight.n_padded, weight.groups_per_row()}, weight.zeros);
  }
  void SetOutliers(const TileCooArrays& arrays) {
    Set("p.outlier_tile_indptr", DType::kU32, {3}, arrays.tile_indptr);
    Set("p.outlier_bucket_info", DType::kU16, {2, 8, 2}, arrays.bucket_info);
    Set("p.outlier_groups", DType::kU8, {static_cast<int64_t>(arrays.records.size()), 16},
        arrays.records);
  }
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  std::optional<uint32_t> StoredChecksum(const TensorInfo& tensor) const override {
    if (!has_checksums) return std::nullopt;
    const std::vector<uint8_t>& bytes = bytes_.at(tensor.name);
    return Crc32c(bytes.data(), bytes.size());
  }
  absl::Status ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                        void* out) const override {
    const std::vector<uint8_t>& bytes = bytes_.at(tensor.name);
    const auto row_bytes = bytes.size() / static_cast<size_t>(tensor.num_rows());
    std::copy_n(bytes.data() + static_cast<size_t>(first_row) * row_bytes,
                static_cast<size_t>(num_rows) * row_bytes, static_cast<uint8_t*>(out));
    return absl::OkStatus();
  }
  bool has_checksums = true;

 private:
  std::vector<TensorInfo> infos_;
  std::map<std::string, std::vector<uint8_t>> bytes_;
};

class QuantizedLinearTest : public testing::Test {
 protected:
  QuantizedLinearTest() {
    Json section = GoodSection();
    section["true_shapes"] = {{"p", {kN, kK}}};
    config_ = **ParseQuantizationConfig({{"quantization_config", section}});
    layer_ = MakeLayer();
    tensors_.SetWeight(layer_.weight);
    tensors_.SetOutliers(layer_.arrays);
  }
  absl::StatusOr<QuantizedLinearTensors> Read() {
    return ReadQuantizedLinear(tensors_, config_, "p", kN, kK);
  }
  absl::Status ReadWith(const Int4Weight& weight) {
    tensors_.SetWeight(weight);
    return Read().status();
  }
  absl::Status ReadWith(const TileCooArrays& arrays) {
    tensors_.SetOutliers(arrays);
    return Read().status();
  }
  QuantizationConfig config_;
  Layer layer_;
  MemoryTensors tensors_;
};

TEST_F(QuantizedLinearTest, ReadsCodesScalesZerosAndOutliers) {
  const auto layer = Read();
  FQ_ASSERT_OK(layer);
  EXPECT_EQ(layer->weight.Code(0, 0), 0xa);
  EXPECT_EQ(layer->weight.Code(0, 1), 0x9);
  EXPECT_EQ(layer->weight.n, kN);
  EXPECT_EQ(layer->weight.k_padded, 96);
  EXPECT_EQ(layer->weight.ZeroPoint(19, 2), 3);
  ASSERT_TRUE(layer->outliers.has_value());
  EXPECT_EQ(layer->outliers->num_records(), 1);
  EXPECT_TRUE(IsQuantizedLinear(tensors_, "p"));
  EXPECT_FALSE(IsQuantizedLinear(tensors_, "q"));
}

TEST_F(QuantizedLinearTest, OutliersAreAllThreeOrNone) {
  for (const char* suffix : {".outlier_tile_indptr", ".outlier_bucket_info", ".outlier_groups"}) {
    tensors_.SetOutliers(layer_.arrays);
    tensors_.Erase(std::string("p") + suffix);
    EXPECT_THAT(Read(), IsDataLoss(std::string("missing tensor p") + suffix));
  }
  for (const char* suffix : {".outlier_tile_indptr", ".outlier_bucket_info", ".outlier_groups"}) {
    tensors_.Erase(std::string("p") + suffix);
  }
  const auto layer = Read();
  FQ_ASSERT_OK(layer);
  EXPECT_FALSE(layer->outliers.has_value());
}

// M10
TEST_F(QuantizedLinearTest, DtypeAndShapeMustBeThoseOfTheLayer) {
  tensors_.Set("p.scales", DType::kF16, {24, 3}, layer_.weight.scales);
  EXPECT_THAT(Read(), IsDataLoss("tensor p.scales: dtype (need BF16, got F16)"));
  tensors_.SetWeight(layer_.weight);
  tensors_.Set("p.qweight", DType::kU8, {48, 24}, layer_.weight.qweight);
  EXPECT_THAT(Read(), IsDataLoss("tensor p.qweight: shape (need [24, 48], got [48, 24])"));
  tensors_.SetWeight(layer_.weight);
  tensors_.Set("p.outlier_groups", DType::kU8, {1, 8}, std::vector<uint8_t>(8));
  EXPECT_THAT(Read(), IsDataLoss("tensor p.outlier_groups: shape"));
}

// M11
TEST_F(QuantizedLinearTest, ZerosAreThereExactlyWhenAsymmetric) {
  config_.symmetric = true;
  EXPECT_THAT(Read(), IsDataLoss("p.zeros: there although the checkpoint is symmetric"));
  config_.symmetric = false;
  tensors_.Erase("p.zeros");
  EXPECT_THAT(Read(), IsDataLoss("missing tensor p.zeros"));
}

TEST_F(QuantizedLinearTest, PaddedLayersMustStateTheirTrueShape) {
  config_.true_shapes = {{"p", {kN, kK + 1}}};
  EXPECT_THAT(Read(), IsDataLoss("true_shapes: p (need [20, 70], got [20,71])"));
  config_.true_shapes = Json::object();
  EXPECT_THAT(Read(), IsDataLoss("true_shapes: p missing"));
}

// M14
TEST_F(QuantizedLinearTest, ScalesMustBeFiniteAndMayBeZero) {
  for (const uint16_t bits : std::initializer_list<uint16_t>{0x7f80, 0xff80, 0x7fc0}) {
    Int4Weight weight = layer_.weight;
    weight.scales[7].bits = bits;
    EXPECT_THAT(ReadWith(weight), IsDataLoss("p: int4: row 2 group 1: scale"));
  }
  for (const uint16_t bits : std::initializer_list<uint16_t>{0x0000, 0x0001, 0x8001}) {
    Int4Weight weight = layer_.weight;
    weight.scales[7].bits = bits;
    FQ_EXPECT_OK(ReadWith(weight));
  }
}

// M15
TEST_F(QuantizedLinearTest, ZeroPointsHaveFourBits) {
  Int4Weight weight = layer_.weight;
  weight.zeros[7] = 16;
  EXPECT_THAT(ReadWith(weight), IsDataLoss("zero point 16 (limit 15)"));
}

// M16
TEST_F(QuantizedLinearTest, OutlierIndexMustBeConsistent) {
  TileCooArrays arrays = layer_.arrays;
  arrays.tile_indptr = {0, 1, 0};
  EXPECT_THAT(ReadWith(arrays), IsDataLoss("p: outliers: tile 1"));
  arrays = layer_.arrays;
  arrays.tile_indptr = {0, 1, 2};
  EXPECT_THAT(ReadWith(arrays), IsDataLoss("p: outliers: tile_indptr ends with 2"));
  arrays = layer_.arrays;
  arrays.bucket_info[1].count = 2;
  EXPECT_THAT(ReadWith(arrays), IsDataLoss("p: outliers: tile 0 bucket 1"));
  arrays = layer_.arrays;
  arrays.bucket_info[3].offset = 7;
  EXPECT_THAT(ReadWith(arrays), IsDataLoss("p: outliers: tile 0 bucket 3"));
  arrays = layer_.arrays;
  arrays.records[0].row[0] = 64;
  EXPECT_THAT(ReadWith(arrays), IsDataLoss("p: outliers: tile 0 bucket 1"));
  arrays = layer_.arrays;
  arrays.records[0].col = {20, 20, 20, 20};
  EXPECT_THAT(ReadWith(arrays), IsDataLoss("p: outliers: tile 0 bucket 1"));
  arrays = layer_.arrays;
  arrays.records[0].value[1] = 0x4120;
  EXPECT_THAT(ReadWith(arrays), IsDataLoss("p: outliers: tile 0 bucket 1"));
}

// M17
TEST_F(QuantizedLinearTest, OutlierValuesMustBeFinite) {
  for (const uint16_t bits : std::initializer_list<uint16_t>{0x7f80, 0x7fc1, 0xff80}) {
    TileCooArrays arrays = layer_.arrays;
    arrays.records[0].value[0] = bits;
    EXPECT_THAT(ReadWith(arrays), IsDataLoss("not finite"));
  }
}

// M18
TEST_F(QuantizedLinearTest, PaddingSlotsObeyTheRulesOfOthers) {
  TileCooArrays arrays = layer_.arrays;
  arrays.records[0].row[3] = 200;  // a null slot, read like any other
  EXPECT_THAT(ReadWith(arrays), IsDataLoss("p: outliers: tile 0 bucket 1"));
}

TEST_F(QuantizedLinearTest, CodeUnderAnOutlierMustBeTheZeroPoint) {
  Int4Weight weight = layer_.weight;
  weight.qweight[9 * 48 + 2] = 0x43;  // (n, k) = (9, 5) is code 4
  EXPECT_THAT(ReadWith(weight), IsDataLoss("p: "));
}

// M21
TEST_F(QuantizedLinearTest, ChecksumsOfScalesAndOutliersMustBeThere) {
  tensors_.has_checksums = false;
  EXPECT_THAT(Read(), IsDataLoss("tensor p.scales: checksum missing"));
}

// M21: a flipped bit anywhere in scales, zero points or outlier tensors of a written folder.
TEST(WrittenLayerTest, RoundTripsAndRefusesEveryFlippedByte) {
  const TempDir dir;
  const Layer layer = MakeLayer();
  TileCooGeometry geometry;
  geometry.k = kK;
  geometry.n = kN;
  geometry.tile_k = geometry.tile_n = 64;
  geometry.buckets_per_tile = 8;
  const auto matrix = TileCooMatrix::Create(geometry, layer.arrays);
  FQ_ASSERT_OK(matrix);
  Json section = GoodSection();
  section["true_shapes"] = {{"p", {kN, kK}}};
  auto writer = CheckpointWriter::Create(dir.File("out"));
  FQ_ASSERT_OK(writer);
  FQ_ASSERT_OK(WriteQuantizedLinear(writer->get(), "p", layer.weight, &*matrix));
  FQ_ASSERT_OK((*writer)->Finish({{"quantization_config", section}}));

  auto checkpoint = OpenCheckpoint(dir.File("out"));
  FQ_ASSERT_OK(checkpoint);
  const QuantizationConfig config = **ParseQuantizationConfig(checkpoint->config);
  const auto read = ReadQuantizedLinear(*checkpoint->tensors, config, "p", kN, kK);
  FQ_ASSERT_OK(read);
  EXPECT_EQ(read->weight.qweight, layer.weight.qweight);
  EXPECT_EQ(read->weight.scales, layer.weight.scales);
  EXPECT_EQ(read->weight.zeros, layer.weight.zeros);
  EXPECT_EQ(read->outliers->arrays().records, layer.arrays.records);
  EXPECT_EQ(read->outliers->arrays().bucket_info, layer.arrays.bucket_info);
  EXPECT_EQ(read->outliers->arrays().tile_indptr, layer.arrays.tile_indptr);

  const std::string path = dir.File("out/model.safetensors");
  const std::string file = ReadAll(path);
  const size_t codes_end = file.size() - (24 * 3 * 2 + 24 * 3 + 3 * 4 + 16 * 4 + 16);
  for (size_t i = codes_end; i < file.size(); ++i) {
    std::string changed = file;
    changed[i] = static_cast<char>(changed[i] ^ 0x04);
    dir.Write("out/model.safetensors", changed);
    checkpoint = OpenCheckpoint(dir.File("out"));
    FQ_ASSERT_OK(checkpoint);
    EXPECT_THAT(ReadQuantizedLinear(*checkpoint->tensors, config, "p", kN, kK),
                IsDataLoss("checksum"))
        << i;
  }
}

}  // namespace
}  // namespace flashquant
