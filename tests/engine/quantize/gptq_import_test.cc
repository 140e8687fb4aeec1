// GPTQ folders through `flashquant quantize`: codes taken over, outliers beside them, act-order
// quantized anew; the folders are made by hand (gptq_builder.h) from the tiny llama's weights.
#include "engine/quantize/gptq_import.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/checkpoint/gguf_reader.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "engine/quantize/hessian.h"
#include "engine/tools/commands.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint/gptq_builder.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/engine/quantize/tiny_llama.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;
using testing::Not;

struct CommandResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

CommandResult Quantize(std::vector<std::string> arguments) {
  CLI::App app;
  CommandResult result;
  AddQuantizeCommand(app, &result.exit_code);
  arguments.insert(arguments.begin(), "quantize");
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes a vector
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  app.parse(arguments);
  std::fflush(stdout);
  result.out = testing::internal::GetCapturedStdout();
  result.err = testing::internal::GetCapturedStderr();
  return result;
}

std::vector<float> WeightsOf(const Checkpoint& checkpoint, const std::string& layer) {
  const TensorInfo* const info = checkpoint.tensors->Find(layer + ".weight");
  std::vector<float> weights(static_cast<size_t>(info->shape[0] * info->shape[1]));
  FQ_EXPECT_OK(checkpoint.tensors->ReadRowsAsFloat(*info, 0, info->shape[0], weights.data()));
  return weights;
}

// What a quantized folder's layer stands for, from its tensors.
std::vector<float> DenseOf(const Checkpoint& folder, const std::string& layer, int64_t n,
                           int64_t k) {
  const auto config = ParseQuantizationConfig(folder.config);
  FQ_EXPECT_OK(config);
  const auto linear = ReadQuantizedLinear(*folder.tensors, **config, layer, n, k);
  FQ_EXPECT_OK(linear);
  std::vector<float> dense(static_cast<size_t>(n * k));
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t column = 0; column < k; ++column) {
      const Int4Weight& weight = linear->weight;
      const int64_t group = column / weight.group_size;
      dense[static_cast<size_t>(row * k + column)] =
          ToFloat(weight.scales[static_cast<size_t>(row * weight.groups_per_row() + group)]) *
          static_cast<float>(weight.Code(row, column) - weight.ZeroPoint(row, group));
    }
  }
  if (linear->outliers.has_value()) {
    linear->outliers->ForEachSlot([&](int64_t column, int64_t row, uint16_t bits) {
      dense[static_cast<size_t>(row * k + column)] += ToFloat(BFloat16{bits});
    });
  }
  return dense;
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
  }
  return sum;
}

class GptqImportTest : public testing::Test {
 protected:
  struct Options {
    int64_t group_size = 64;
    bool symmetric = false;
    bool act_order = false;
    bool v2 = false;
  };

  void SetUp() override {
    CopyTinyLlama(dir_ / "original");
    std::ofstream(dir_ / "text.txt") << TinyText(4000);
    auto original = OpenCheckpoint(dir_ / "original");
    FQ_ASSERT_OK(original);
    original_ = std::make_unique<Checkpoint>(*std::move(original));
    for (const TensorInfo& tensor : original_->tensors->tensors()) {
      if (tensor.name.find(".layers.") == std::string::npos || tensor.shape.size() != 2) continue;
      layers_.push_back(tensor.name.substr(0, tensor.name.size() - 7));
    }
  }

  // The tiny llama with all its linear layers rounded to nearest, in GPTQ's form.
  void WriteGptq(const std::string& path, const Options& options) {
    GptqFolder folder;
    folder.config = original_->config;
    folder.quantization["group_size"] = options.group_size;
    folder.quantization["desc_act"] = options.act_order;
    folder.quantization["sym"] = options.symmetric;
    folder.quantization["checkpoint_format"] = options.v2 ? "gptq_v2" : "gptq";
    for (const TensorInfo& tensor : original_->tensors->tensors()) {
      const std::string layer = tensor.name.substr(0, tensor.name.size() - 7);
      if (std::find(layers_.begin(), layers_.end(), layer) == layers_.end()) {
        const auto bytes = original_->tensors->ReadBytes(tensor.name);
        FQ_ASSERT_OK(bytes);
        folder.AddTensor(tensor.name, std::string(DTypeName(tensor.dtype)), tensor.shape,
                         std::string(bytes->begin(), bytes->end()));
        continue;
      }
      const int64_t k = tensor.shape[1];
      std::vector<int> group_of =
          ContiguousGroups(k, options.group_size == -1 ? k : options.group_size);
      if (options.act_order) std::shuffle(group_of.begin(), group_of.end(), std::mt19937(5));
      GptqNumbers numbers = QuantizePlainly(WeightsOf(*original_, layer), tensor.shape[0], k,
                                            group_of, options.symmetric);
      if (!options.v2) {
        for (int& zero : numbers.zeros) zero = std::max(zero, 1);  // v1 cannot say 0
      }
      folder.AddLayer(layer, numbers,
                      options.v2 ? GptqFolder::Zeros::kAsTheyAre : GptqFolder::Zeros::kLessOne);
      numbers_[layer] = numbers;
    }
    folder.WriteTo(path);
    std::filesystem::copy_file(dir_ / "original/tokenizer.json", path + "/tokenizer.json");
  }

  // Every weight of `path` against the numbers that the GPTQ folder was made of.
  void ExpectImported(const std::string& path) {
    const auto folder = OpenCheckpoint(path);
    FQ_ASSERT_OK(folder);
    for (const auto& [layer, numbers] : numbers_) {
      const std::vector<float> dense = DenseOf(*folder, layer, numbers.n, numbers.k);
      for (int64_t row = 0; row < numbers.n; ++row) {
        for (int64_t column = 0; column < numbers.k; ++column) {
          const double expected = numbers.Value(row, column);
          ASSERT_NEAR(static_cast<double>(dense[static_cast<size_t>(row * numbers.k + column)]),
                      expected, std::fabs(expected) / 256)
              << layer << " " << row << ", " << column;
        }
      }
    }
  }

  // Sum over the layers of the squared distance of the weights from the original's.
  double DistanceFromOriginal(const std::string& path) {
    const auto folder = OpenCheckpoint(path);
    FQ_EXPECT_OK(folder);
    double sum = 0;
    for (const auto& [layer, numbers] : numbers_) {
      sum += Distance(DenseOf(*folder, layer, numbers.n, numbers.k), WeightsOf(*original_, layer));
    }
    return sum;
  }

  static double OutputError(const std::string& path) {
    const nlohmann::json report = nlohmann::json::parse(FileBytes(path + "/quantize_report.json"));
    return report["total"]["relative_output_error"].get<double>();
  }

  const WorkDir dir_;
  std::unique_ptr<Checkpoint> original_;
  std::vector<std::string> layers_;
  std::map<std::string, GptqNumbers> numbers_;
};

TEST_F(GptqImportTest, CodesAreTakenOverInBothFormsSymmetricAndNot) {
  int number = 0;
  for (const bool v2 : {false, true}) {
    for (const bool symmetric : {false, true}) {
      for (const int64_t group_size : {32, 128, -1}) {
        const std::string in = dir_ / ("in" + std::to_string(number));
        const std::string out = dir_ / ("out" + std::to_string(number++));
        WriteGptq(in, {.group_size = group_size, .symmetric = symmetric, .v2 = v2});
        const CommandResult result = Quantize({"--input", in, "--output", out});
        ASSERT_EQ(result.exit_code, 0) << result.err;
        EXPECT_THAT(result.out, HasSubstr("with BF16 scales no weight of it moves by more than"));
        ExpectImported(out);
        const auto folder = OpenCheckpoint(out);
        const nlohmann::json& config = folder->config["quantization_config"];
        EXPECT_EQ(config["group_size"], group_size);
        EXPECT_EQ(config["symmetric"], symmetric);
        EXPECT_EQ(config["method"], "imported gptq");
        EXPECT_EQ(config["stored_density"], 0);
      }
    }
  }
}

TEST_F(GptqImportTest, GroupsOf256BecomeTwoOf128) {
  WriteGptq(dir_ / "in", {.group_size = 256});
  const CommandResult result = Quantize({"--input", dir_ / "in", "--output", dir_ / "out"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  ExpectImported(dir_ / "out");
  EXPECT_EQ(OpenCheckpoint(dir_ / "out")->config["quantization_config"]["group_size"], 128);
}

TEST_F(GptqImportTest, OutliersFromTheOriginalBringTheWeightsCloserToIt) {
  WriteGptq(dir_ / "in", {});
  ASSERT_EQ(Quantize({"--input", dir_ / "in", "--output", dir_ / "alone"}).exit_code, 0);
  const CommandResult result = Quantize({"--input", dir_ / "in", "--output", dir_ / "with",
                                         "--original", dir_ / "original", "--density", "0.03"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_LT(DistanceFromOriginal(dir_ / "with"), 0.8 * DistanceFromOriginal(dir_ / "alone"));
  const auto folder = OpenCheckpoint(dir_ / "with");
  EXPECT_NEAR(folder->config["quantization_config"]["stored_density"].get<double>(), 0.03, 0.002);
  EXPECT_EQ(folder->config["quantization_config"]["method"], "imported gptq+outliers");
  // Outside of the outliers the codes are the checkpoint's.
  const auto config = ParseQuantizationConfig(folder->config);
  const GptqNumbers& numbers = numbers_.at(layers_[0]);
  const auto linear =
      ReadQuantizedLinear(*folder->tensors, **config, layers_[0], numbers.n, numbers.k);
  FQ_ASSERT_OK(linear);
  std::vector<bool> is_outlier(numbers.codes.size(), false);
  linear->outliers->ForEachSlot([&](int64_t column, int64_t row, uint16_t) {
    is_outlier[static_cast<size_t>(row * numbers.k + column)] = true;
  });
  for (size_t i = 0; i < is_outlier.size(); ++i) {
    if (is_outlier[i]) continue;
    const auto row = static_cast<int64_t>(i) / numbers.k;
    ASSERT_EQ(linear->weight.Code(row, static_cast<int64_t>(i) % numbers.k), numbers.codes[i]);
  }
}

TEST_F(GptqImportTest, WithCalibrationOutliersLowerTheOutputError) {
  WriteGptq(dir_ / "in", {});
  const std::vector<std::string> common = {"--input",         dir_ / "in",     "--original",
                                           dir_ / "original", "--calibration", dir_ / "text.txt"};
  const auto run = [&](const std::string& out, const std::string& density) {
    std::vector<std::string> arguments = common;
    arguments.insert(arguments.end(), {"--output", out, "--density", density});
    const CommandResult result = Quantize(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  };
  run(dir_ / "without", "0");
  run(dir_ / "one", "0.01");
  run(dir_ / "three", "0.03");
  ExpectImported(dir_ / "without");
  EXPECT_LT(OutputError(dir_ / "one"), 0.8 * OutputError(dir_ / "without"));
  // The model has about 1% of large outliers: more than those help the wide scales little.
  EXPECT_LT(OutputError(dir_ / "three"), 0.8 * OutputError(dir_ / "without"));
}

TEST_F(GptqImportTest, ActOrderIsQuantizedAnewAndSaysSo) {
  WriteGptq(dir_ / "in", {.act_order = true});
  const CommandResult result =
      Quantize({"--input", dir_ / "in", "--output", dir_ / "out", "--density", "0.03"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              HasSubstr("quantized anew, the inputs of a group do not lie side by side"));
  const auto gptq = CheckpointFromPath(dir_ / "in");
  const auto folder = OpenCheckpoint(dir_ / "out");
  FQ_ASSERT_OK(folder);
  for (const auto& [layer, numbers] : numbers_) {
    const std::vector<float> theirs = WeightsOf(*gptq, layer);
    const std::vector<float> ours = DenseOf(*folder, layer, numbers.n, numbers.k);
    EXPECT_LT(Distance(ours, theirs), 0.01 * Distance(theirs, std::vector<float>(theirs.size())))
        << layer;
  }
}

TEST_F(GptqImportTest, AMethodQuantizesTheDequantizedWeightsAnew) {
  WriteGptq(dir_ / "in", {});
  const CommandResult result =
      Quantize({"--input", dir_ / "in", "--output", dir_ / "out", "--method", "spqr", "--density",
                "0.02", "--group-size", "128", "--calibration", dir_ / "text.txt"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(OpenCheckpoint(dir_ / "out")->config["quantization_config"]["method"], "gptq+outliers");
}

TEST_F(GptqImportTest, WhatDoesNotFitTogetherIsRefused) {
  WriteGptq(dir_ / "in", {});
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"--input", dir_ / "in", "--density", "0.01"}, "need --original"},
      {{"--input", dir_ / "in", "--threshold", "0.1"}, "need --original"},
      {{"--input", dir_ / "in", "--group-size", "128"}, "the codes that are taken over have 64"},
      {{"--input", dir_ / "in", "--symmetric"}, "zero points other than 8"},
      {{"--input", dir_ / "original", "--original", dir_ / "original"}, "is no GPTQ checkpoint"},
      {{"--input", dir_ / "in", "--original", dir_ / "original", "--method", "rtn"},
       "not with --method"},
  };
  for (const auto& [arguments, message] : wrong) {
    std::vector<std::string> all = arguments;
    all.insert(all.end(), {"--output", dir_ / "out"});
    const CommandResult result = Quantize(all);
    EXPECT_NE(result.exit_code, 0);
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
  }
}

TEST_F(GptqImportTest, GroupsThatTheFormatDoesNotHaveAreRefusedUnlessAMethodIsNamed) {
  WriteGptq(dir_ / "in", {.group_size = 16});
  const CommandResult refused = Quantize({"--input", dir_ / "in", "--output", dir_ / "out"});
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_THAT(refused.err, HasSubstr("group_size 16: its codes cannot be taken over"));
  EXPECT_EQ(
      Quantize({"--input", dir_ / "in", "--output", dir_ / "out", "--method", "rtn"}).exit_code, 0);
}

TEST(ImportGptqLayerTest, ShapesThatDisagreeWithTheOriginalAreFoundByTheQuantizer) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "original");
  GptqFolder folder;
  folder.config = {{"architectures", {"LlamaForCausalLM"}}};
  folder.AddLayer("model.layers.0.mlp.up_proj",
                  QuantizePlainly(std::vector<float>(16 * 256, 0.1f), 16, 256,
                                  ContiguousGroups(256, 128), false),
                  GptqFolder::Zeros::kAsTheyAre);
  folder.quantization["checkpoint_format"] = "gptq_v2";
  folder.WriteTo(dir / "in");
  const CommandResult result =
      Quantize({"--input", dir / "in", "--output", dir / "out", "--original", dir / "original"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("the codes are of a [16, 256] matrix (need [24, 256])"));
}

}  // namespace
}  // namespace flashquant
