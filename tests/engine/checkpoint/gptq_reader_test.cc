// GPTQ folders made by hand: every number read back, both forms of zero points, act-order, and all
// the ways in which such a folder can be wrong.
#include "engine/checkpoint/gptq_reader.h"

#include <functional>
#include <random>

#include "engine/checkpoint/gguf_reader.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint/gptq_builder.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;
using Zeros = GptqFolder::Zeros;

constexpr char kLayer[] = "model.layers.0.mlp.up_proj";

// Random codes, zero points from `least_zero` to 15 and scales.
GptqNumbers SomeNumbers(int64_t n, int64_t k, std::vector<int> group_of, int least_zero) {
  std::mt19937 random(7);
  GptqNumbers numbers;
  numbers.n = n;
  numbers.k = k;
  numbers.group_of = std::move(group_of);
  numbers.groups = 1 + *std::max_element(numbers.group_of.begin(), numbers.group_of.end());
  for (int64_t i = 0; i < n * k; ++i) numbers.codes.push_back(static_cast<int>(random() % 16));
  for (int64_t i = 0; i < n * numbers.groups; ++i) {
    numbers.zeros.push_back(least_zero + static_cast<int>(random() % (16u - least_zero)));
    numbers.scales.push_back(ToFloat(ToHalf(0.001f + 0.0001f * static_cast<float>(random() % 97))));
  }
  return numbers;
}

// Inputs of a group anywhere, each group as often as the size says.
std::vector<int> ShuffledGroups(int64_t k, int64_t group_size) {
  std::vector<int> group_of = ContiguousGroups(k, group_size);
  std::shuffle(group_of.begin(), group_of.end(), std::mt19937(11));
  return group_of;
}

class GptqReaderTest : public testing::Test {
 protected:
  absl::StatusOr<Checkpoint> Open() {
    folder_.WriteTo(dir_.path());
    return CheckpointFromPath(dir_.path());
  }
  void ExpectNumbers(const GptqNumbers& numbers) {
    const auto checkpoint = Open();
    FQ_ASSERT_OK(checkpoint);
    const TensorInfo* const info = checkpoint->tensors->Find(std::string(kLayer) + ".weight");
    ASSERT_NE(info, nullptr);
    EXPECT_EQ(info->shape, (std::vector<int64_t>{numbers.n, numbers.k}));
    EXPECT_EQ(info->dtype, DType::kF32);
    std::vector<float> weights(static_cast<size_t>(numbers.n * numbers.k));
    FQ_ASSERT_OK(checkpoint->tensors->ReadRowsAsFloat(*info, 0, numbers.n, weights.data()));
    for (int64_t row = 0; row < numbers.n; ++row) {
      for (int64_t column = 0; column < numbers.k; ++column) {
        ASSERT_EQ(static_cast<double>(weights[static_cast<size_t>(row * numbers.k + column)]),
                  numbers.Value(row, column))
            << row << ", " << column;
      }
    }
    std::vector<float> part(static_cast<size_t>(2 * numbers.k));
    FQ_ASSERT_OK(checkpoint->tensors->ReadRowsAsFloat(*info, 3, 2, part.data()));
    EXPECT_TRUE(std::equal(part.begin(), part.end(), weights.begin() + 3 * numbers.k));
    EXPECT_EQ(checkpoint->tensors->Find(std::string(kLayer) + ".qweight"), nullptr);
    EXPECT_FALSE(checkpoint->config.contains("quantization_config"));
  }

  TempDir dir_;
  GptqFolder folder_;
};

TEST_F(GptqReaderTest, ZeroPointsStoredLessOneReadBack) {
  const GptqNumbers numbers = SomeNumbers(16, 256, ContiguousGroups(256, 128), 1);
  folder_.AddLayer(kLayer, numbers, Zeros::kLessOne);
  ExpectNumbers(numbers);
}

TEST_F(GptqReaderTest, ZeroPointsStoredAsTheyAreReadBack) {
  const GptqNumbers numbers = SomeNumbers(16, 256, ContiguousGroups(256, 128), 0);
  folder_.quantization["checkpoint_format"] = "gptq_v2";
  folder_.AddLayer(kLayer, numbers, Zeros::kAsTheyAre);
  ExpectNumbers(numbers);
}

TEST_F(GptqReaderTest, ZeroPointsOfZeroThatBorrowedFromTheirWordReadBack) {
  const GptqNumbers numbers = SomeNumbers(16, 256, ContiguousGroups(256, 128), 0);
  ASSERT_GT(std::count(numbers.zeros.begin(), numbers.zeros.end(), 0), 0);
  folder_.quantization["meta"] = {{"quantizer", {"gptqmodel:2.0.0"}}};
  folder_.AddLayer(kLayer, numbers, Zeros::kLessOneFromWords);
  ExpectNumbers(numbers);
}

TEST_F(GptqReaderTest, AStoredZeroPointOf15IsRefusedWhereItsMeaningIsNotKnown) {
  GptqNumbers numbers = SomeNumbers(16, 256, ContiguousGroups(256, 128), 1);
  numbers.zeros[5] = 0;  // of output 2, group 1
  folder_.AddLayer(kLayer, numbers, Zeros::kLessOne);
  const auto checkpoint = Open();
  FQ_ASSERT_OK(checkpoint);
  EXPECT_THAT(AsGptq(*checkpoint->tensors)->ReadLayer(kLayer),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("model.layers.0.mlp.up_proj.qzeros: output 2, group 1")));
}

TEST_F(GptqReaderTest, ActOrderReadsBack) {
  const GptqNumbers numbers = SomeNumbers(24, 384, ShuffledGroups(384, 64), 1);
  folder_.quantization["group_size"] = 64;
  folder_.quantization["desc_act"] = true;
  folder_.AddLayer(kLayer, numbers, Zeros::kLessOne);
  ExpectNumbers(numbers);
  const auto checkpoint = Open();
  EXPECT_TRUE(AsGptq(*checkpoint->tensors)->HasActOrder());
  EXPECT_FALSE(AsGptq(*checkpoint->tensors)->HasContiguousGroups(kLayer));
}

TEST_F(GptqReaderTest, GroupsAreContiguousWhateverDescActSaysAndWithoutGroupIndices) {
  const GptqNumbers numbers = SomeNumbers(8, 256, ContiguousGroups(256, 128), 1);
  folder_.quantization["desc_act"] = true;
  folder_.AddLayer(kLayer, numbers, Zeros::kLessOne);
  const auto with = Open();
  EXPECT_TRUE(AsGptq(*with->tensors)->HasContiguousGroups(kLayer));
  EXPECT_FALSE(AsGptq(*with->tensors)->HasActOrder());
  folder_.Remove(std::string(kLayer) + ".g_idx");
  ExpectNumbers(numbers);
}

TEST_F(GptqReaderTest, OneGroupPerRowReadsBack) {
  const GptqNumbers numbers = SomeNumbers(8, 96, ContiguousGroups(96, 96), 1);
  folder_.quantization["group_size"] = -1;
  folder_.AddLayer(kLayer, numbers, Zeros::kLessOne);
  ExpectNumbers(numbers);
}

TEST_F(GptqReaderTest, OlderFoldersSayItInAFileOfItsOwn) {
  const GptqNumbers numbers = SomeNumbers(8, 256, ContiguousGroups(256, 128), 1);
  folder_.quantization_file = "quantize_config.json";
  folder_.quantization.erase("quant_method");
  folder_.quantization.erase("checkpoint_format");
  folder_.AddLayer(kLayer, numbers, Zeros::kLessOne);
  ExpectNumbers(numbers);
}

TEST_F(GptqReaderTest, AnOlderFoldersFileThatIsNoObjectIsRefused) {
  folder_.quantization_file = "quantize_config.json";
  folder_.AddLayer(kLayer, SomeNumbers(8, 256, ContiguousGroups(256, 128), 1), Zeros::kLessOne);
  for (const nlohmann::json& other : {nlohmann::json::array(), nlohmann::json("gptq")}) {
    folder_.quantization = other;
    EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("quantize_config.json")));
  }
}

TEST_F(GptqReaderTest, EightEverywhereIsKnownFromTheZeroPoints) {
  GptqNumbers numbers = SomeNumbers(8, 256, ContiguousGroups(256, 128), 1);
  std::fill(numbers.zeros.begin(), numbers.zeros.end(), 8);
  folder_.AddLayer(kLayer, numbers, Zeros::kLessOne);
  auto checkpoint = Open();
  EXPECT_TRUE(*AsGptq(*checkpoint->tensors)->AllZeroPointsAreEight());
  numbers.zeros[3] = 7;
  folder_.AddLayer(kLayer, numbers, Zeros::kLessOne);
  checkpoint = Open();
  EXPECT_FALSE(*AsGptq(*checkpoint->tensors)->AllZeroPointsAreEight());
}

TEST_F(GptqReaderTest, OtherTensorsComeThroughAndAFolderThatIsNotGptqStaysAsItIs) {
  folder_.AddLayer(kLayer, SomeNumbers(8, 256, ContiguousGroups(256, 128), 1), Zeros::kLessOne);
  folder_.AddTensor(std::string(kLayer) + ".bias", "F16", {8}, std::string(16, '\1'));
  folder_.AddTensor("model.norm.weight", "BF16", {4}, std::string(8, '\2'));
  const auto gptq = Open();
  FQ_ASSERT_OK(gptq);
  const auto bias = gptq->tensors->ReadBytes(std::string(kLayer) + ".bias");
  FQ_ASSERT_OK(bias);
  EXPECT_EQ(*bias, std::vector<uint8_t>(16, 1));
  EXPECT_NE(gptq->tensors->Find("model.norm.weight"), nullptr);

  folder_.quantization["quant_method"] = "awq";
  const auto awq = Open();
  FQ_ASSERT_OK(awq);
  EXPECT_EQ(AsGptq(*awq->tensors), nullptr);
  EXPECT_TRUE(awq->config.contains("quantization_config"));
}

TEST_F(GptqReaderTest, WhatIsNotSupportedIsRefusedByName) {
  const std::vector<std::pair<std::string, nlohmann::json>> wrong = {
      {"bits", 8},
      {"bits", 3},
      {"checkpoint_format", "marlin"},
      {"is_marlin_format", true},
      {"pack_dtype", "int16"},
      {"dynamic", {{"-:.*down.*", nlohmann::json::object()}}}};
  folder_.AddLayer(kLayer, SomeNumbers(8, 256, ContiguousGroups(256, 128), 1), Zeros::kLessOne);
  for (const auto& [key, value] : wrong) {
    GptqFolder folder = folder_;
    folder.quantization[key] = value;
    folder.WriteTo(dir_.path());
    EXPECT_THAT(CheckpointFromPath(dir_.path()),
                StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(key)));
  }
}

TEST_F(GptqReaderTest, WrongConfigurationsAreDataLoss) {
  const std::vector<std::pair<std::string, nlohmann::json>> wrong = {
      {"bits", "four"},         {"bits", nullptr},         {"group_size", 0},
      {"group_size", -2},       {"group_size", 1.5},       {"group_size", 9000000000},
      {"checkpoint_format", 2}, {"pack_dtype", {"int32"}}, {"is_marlin_format", "no"}};
  folder_.AddLayer(kLayer, SomeNumbers(8, 256, ContiguousGroups(256, 128), 1), Zeros::kLessOne);
  for (const auto& [key, value] : wrong) {
    GptqFolder folder = folder_;
    folder.quantization[key] = value;
    folder.WriteTo(dir_.path());
    EXPECT_THAT(CheckpointFromPath(dir_.path()),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(key)))
        << value;
  }
}

TEST_F(GptqReaderTest, DamagedLayersAreDataLossAndNameTheTensor) {
  const std::string name = kLayer;
  const std::vector<std::pair<std::string, std::function<void(GptqFolder&)>>> wrong = {
      {".qzeros", [&](GptqFolder& f) { f.Remove(name + ".qzeros"); }},
      {".scales", [&](GptqFolder& f) { f.Remove(name + ".scales"); }},
      {"no tensor *.qweight", [&](GptqFolder& f) { f.Remove(name + ".qweight"); }},
      {".qweight",
       [&](GptqFolder& f) { f.AddTensor(name + ".qweight", "I32", {32}, std::string(128, 0)); }},
      {".qweight",
       [&](GptqFolder& f) {
         f.AddTensor(name + ".qweight", "F32", {32, 8}, std::string(1024, 0));
       }},
      {".qweight",
       [&](GptqFolder& f) {
         f.AddTensor(name + ".qweight", "I32", {32, 7}, std::string(896, 0));
       }},
      {".qweight",
       [&](GptqFolder& f) {
         f.AddTensor(name + ".qweight", "I32", {0, 8}, std::string());
       }},
      {".qzeros",
       [&](GptqFolder& f) {
         f.AddTensor(name + ".qzeros", "I32", {3, 1}, std::string(12, 0));
       }},
      {".qzeros",
       [&](GptqFolder& f) {
         f.AddTensor(name + ".qzeros", "I16", {2, 1}, std::string(4, 0));
       }},
      {".scales",
       [&](GptqFolder& f) {
         f.AddTensor(name + ".scales", "F16", {2, 9}, std::string(36, 0));
       }},
      {".scales",
       [&](GptqFolder& f) {
         f.AddTensor(name + ".scales", "I32", {2, 8}, std::string(64, 0));
       }},
      {".g_idx",
       [&](GptqFolder& f) { f.AddTensor(name + ".g_idx", "I32", {255}, std::string(1020, 0)); }},
      {".g_idx: group of input 7 (limit 1, got 2)",
       [&](GptqFolder& f) { f.Bytes(name + ".g_idx")[28] = 2; }},
      {".g_idx: group of input 255 (limit 1, got -1)",
       [&](GptqFolder& f) { f.Bytes(name + ".g_idx").replace(1020, 4, "\xff\xff\xff\xff"); }},
      {"there are codes for it too",
       [&](GptqFolder& f) { f.AddTensor(name + ".weight", "F16", {1}, std::string(2, 0)); }},
  };
  folder_.AddLayer(name, SomeNumbers(8, 256, ContiguousGroups(256, 128), 1), Zeros::kLessOne);
  for (const auto& [what, damage] : wrong) {
    GptqFolder folder = folder_;
    damage(folder);
    folder.WriteTo(dir_.path());
    EXPECT_THAT(CheckpointFromPath(dir_.path()),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(what)));
  }
}

TEST_F(GptqReaderTest, AScaleThatIsNotFiniteIsFoundWhenItsLayerIsRead) {
  folder_.AddLayer(kLayer, SomeNumbers(8, 256, ContiguousGroups(256, 128), 1), Zeros::kLessOne);
  folder_.Bytes(std::string(kLayer) + ".scales").replace(2 * 11, 2, LittleEndian(0x7c00, 2));
  const auto checkpoint = Open();
  FQ_ASSERT_OK(checkpoint);
  std::vector<float> weights(8 * 256);
  EXPECT_THAT(
      checkpoint->tensors->ReadRowsAsFloat(
          *checkpoint->tensors->Find(std::string(kLayer) + ".weight"), 0, 8, weights.data()),
      StatusIs(absl::StatusCode::kDataLoss, HasSubstr("output 3, group 1: not finite")));
}

}  // namespace
}  // namespace flashquant
