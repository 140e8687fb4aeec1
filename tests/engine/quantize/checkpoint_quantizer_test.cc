// Whole folders: what is written, that it reads back as what was meant, and that nothing
// half-written ever loads.
#include "engine/quantize/checkpoint_quantizer.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <functional>
#include <memory>

#include "engine/checkpoint/quantized_tensors.h"
#include "gtest/gtest.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

absl::StatusOr<QuantizeReport> Quantize(const std::string& input, const std::string& output,
                                        const QuantizeOptions& options = {}) {
  const absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(input);
  if (!checkpoint.ok()) return checkpoint.status();
  return QuantizeCheckpoint(*checkpoint, output, options, nullptr);
}

// Sum of squared differences between the original layer and the quantized one read back.
double ErrorOfLayer(const Checkpoint& original, const Checkpoint& quantized,
                    const std::string& name) {
  const TensorInfo* info = original.tensors->Find(name + ".weight");
  const int64_t n = info->shape[0];
  const int64_t k = info->shape[1];
  std::vector<float> weights(static_cast<size_t>(n * k));
  EXPECT_THAT(original.tensors->ReadRowsAsFloat(*info, 0, n, weights.data()), IsOk());
  const auto config = ParseQuantizationConfig(quantized.config);
  EXPECT_THAT(config, IsOk());
  const auto layer = ReadQuantizedLinear(*quantized.tensors, **config, name, n, k);
  EXPECT_THAT(layer, IsOk()) << name;
  if (!layer.ok()) return HUGE_VAL;
  const Int4Weight& weight = layer->weight;
  std::vector<float> dense(weights.size());
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t column = 0; column < k; ++column) {
      const int64_t group = column / weight.group_size;
      dense[static_cast<size_t>(row * k + column)] =
          ToFloat(weight.scales[static_cast<size_t>(row * weight.groups_per_row() + group)]) *
          static_cast<float>(weight.Code(row, column) - weight.ZeroPoint(row, group));
    }
  }
  if (layer->outliers.has_value()) {
    layer->outliers->ForEachSlot([&](int64_t column, int64_t row, uint16_t bits) {
      float& value = dense[static_cast<size_t>(row * k + column)];
      EXPECT_EQ(value, 0.0f);
      value += ToFloat(BFloat16{bits});
      EXPECT_EQ(value, weights[static_cast<size_t>(row * k + column)]);
    });
  }
  double error = 0;
  for (size_t i = 0; i < dense.size(); ++i) {
    const double difference = static_cast<double>(dense[i] - weights[i]);
    error += difference * difference;
  }
  return error;
}

TEST(CheckpointQuantizerTest, EveryLayerReadsBackWithTheErrorOfTheReport) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const auto report = Quantize(dir / "in", dir / "out");
  FQ_ASSERT_OK(report);
  ASSERT_EQ(report->layers.size(), 2u);
  const auto original = OpenCheckpoint(dir / "in");
  const auto quantized = OpenCheckpoint(dir / "out");
  FQ_ASSERT_OK(quantized);
  for (const LayerReport& layer : report->layers) {
    EXPECT_NEAR(ErrorOfLayer(*original, *quantized, layer.name), layer.error_with,
                1e-6 * layer.error_without);
    EXPECT_LT(layer.error_with, layer.error_without);
    EXPECT_GT(layer.stored_density(), 0.008);
    EXPECT_LE(layer.stored_density(), 0.01);
  }
}

TEST(CheckpointQuantizerTest, TinyLlamaReadsBackSymmetricAndAsymmetric) {
  const std::string input = TestDataPath("tiny_models/llama");
  const WorkDir dir;
  const auto original = OpenCheckpoint(input);
  FQ_ASSERT_OK(original);
  for (const int64_t group_size : {int64_t{32}, int64_t{128}}) {
    QuantizeOptions options;
    options.group_size = group_size;
    options.density = 0.02;
    options.symmetric = group_size == 32;
    const std::string output = dir / ("g" + std::to_string(group_size));
    const auto report = Quantize(input, output, options);
    FQ_ASSERT_OK(report);
    const auto quantized = OpenCheckpoint(output);
    FQ_ASSERT_OK(quantized);
    EXPECT_EQ(report->layers.size(), 14u);
    for (const LayerReport& layer : report->layers) {
      EXPECT_NEAR(ErrorOfLayer(*original, *quantized, layer.name), layer.error_with,
                  1e-6 * layer.error_without);
      EXPECT_LT(layer.relative_error_with(), 0.15);
    }
  }
}

TEST(CheckpointQuantizerTest, OneGroupPerRowReadsBack) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  QuantizeOptions options;
  options.group_size = -1;
  const auto report = Quantize(dir / "in", dir / "out", options);
  FQ_ASSERT_OK(report);
  const auto original = OpenCheckpoint(dir / "in");
  const auto quantized = OpenCheckpoint(dir / "out");
  EXPECT_EQ(quantized->config["quantization_config"]["group_size"], -1);
  for (const LayerReport& layer : report->layers) {
    EXPECT_NEAR(ErrorOfLayer(*original, *quantized, layer.name), layer.error_with,
                1e-6 * layer.error_without);
  }
}

// The code of a whole run in a child process that `prepare` has made the disk small for; -1 when it
// could not.
int CodeOnASmallDisk(const std::string& input, const std::string& output,
                     const std::function<bool()>& prepare) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (!prepare()) ::_exit(255);
    ::_exit(static_cast<int>(Quantize(input, output).status().code()));
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status) == 255 ? -1 : WEXITSTATUS(status);
}

TEST(CheckpointQuantizerTest, AFullDiskEndsTheRunAndLeavesNothing) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const auto limit_files = [](rlim_t num_bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {num_bytes, num_bytes};
    return ::setrlimit(RLIMIT_FSIZE, &limit) == 0;
  };
  // Within the first tensor, within the last, at the report or the configuration.
  for (const rlim_t num_bytes : {100, 1000, 5000, 12000}) {
    EXPECT_EQ(CodeOnASmallDisk(dir / "in", dir / "out", [&] { return limit_files(num_bytes); }),
              static_cast<int>(absl::StatusCode::kResourceExhausted))
        << num_bytes;
    for (const auto& entry : std::filesystem::directory_iterator(dir.path())) {
      EXPECT_EQ(entry.path().filename(), "in") << num_bytes;
    }
  }
  // With room again the same folder can be made.
  FQ_EXPECT_OK(Quantize(dir / "in", dir / "out"));
}

// A file system that is really full, where this process may mount one of its own.
TEST(CheckpointQuantizerTest, AFullFileSystemEndsTheRunAndLeavesNothing) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  std::filesystem::create_directory(dir / "small");
  // In a user namespace of its own, where this user is the only one there is.
  const std::string user = std::to_string(::geteuid());
  const std::string group = std::to_string(::getegid());
  const auto mount_small = [&] {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << user << " " << user << " 1";
    std::ofstream("/proc/self/gid_map") << group << " " << group << " 1";
    return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           ::mount("none", (dir / "small").c_str(), "tmpfs", 0, "size=8k") == 0;
  };
  // The file system goes with the process: what is left in it is looked at before.
  const pid_t child = ::fork();
  if (child == 0) {
    if (!mount_small()) ::_exit(255);
    const absl::StatusCode code = Quantize(dir / "in", dir / "small/out").status().code();
    const bool empty = std::filesystem::is_empty(dir / "small");
    ::_exit(empty ? static_cast<int>(code) : 254);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 255) GTEST_SKIP() << "needs the right to mount a file system";
  EXPECT_EQ(WEXITSTATUS(status), static_cast<int>(absl::StatusCode::kResourceExhausted));
}

TEST(CheckpointQuantizerTest, OutputIsTheSameForAnyNumberOfThreads) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  QuantizeOptions options;
  options.embedding = TableFormat::kInt8;
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "one", options));
  options.num_threads = 5;
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "five", options));
  EXPECT_EQ(FolderBytes(dir / "one"), FolderBytes(dir / "five"));
}

TEST(CheckpointQuantizerTest, ConfigSaysHowTheModelWasQuantized) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const auto report = Quantize(dir / "in", dir / "out");
  FQ_ASSERT_OK(report);
  const auto quantized = OpenCheckpoint(dir / "out");
  FQ_ASSERT_OK(quantized);
  const nlohmann::json& section = quantized->config["quantization_config"];
  EXPECT_EQ(section["quant_method"], "flashquant");
  EXPECT_EQ(section["format_version"], "1.0");
  EXPECT_EQ(section["bits"], 4);
  EXPECT_EQ(section["group_size"], 128);
  EXPECT_EQ(section["symmetric"], false);
  EXPECT_EQ(section["tile_k"], 256);
  EXPECT_EQ(section["tile_n"], 128);
  EXPECT_EQ(section["buckets_per_tile"], 32);
  EXPECT_EQ(section["semantics"], "replace");
  EXPECT_EQ(section["order_hint"], 2);
  EXPECT_EQ(section["lm_head"], "tied");
  EXPECT_EQ(section["target_density"], 0.01);
  // 24 * 256 and 16 * 128 weights; 15 and 5 records fit into 1% of each.
  EXPECT_DOUBLE_EQ(section["stored_density"], 4.0 * (15 + 5) / (24 * 256 + 16 * 128));
  EXPECT_EQ(quantized->config["hidden_size"], 128);
}

TEST(CheckpointQuantizerTest, TokenizerAndLicenceGoAlongAndTheReadmeStays) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "out"));
  const auto files = FolderBytes(dir / "out");
  EXPECT_EQ(files.at("tokenizer.json"), "{\"a tokenizer\": true}");
  EXPECT_EQ(files.at("LICENSE"), "terms");
  EXPECT_EQ(nlohmann::json::parse(files.at("generation_config.json"))["eos_token_id"], 3);
  EXPECT_EQ(nlohmann::json::parse(files.at("quantize_report.json"))["layers"].size(), 2u);
  EXPECT_FALSE(files.contains("README.md"));
}

TEST(CheckpointQuantizerTest, DensityZeroWritesNoOutlierTensor) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  QuantizeOptions options;
  options.density = 0;
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "out", options));
  const auto quantized = OpenCheckpoint(dir / "out");
  for (const TensorInfo& tensor : quantized->tensors->tensors()) {
    EXPECT_THAT(tensor.name, testing::Not(HasSubstr("outlier")));
  }
}

TEST(CheckpointQuantizerTest, ErrorNeverGrowsWithDensity) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  double before = HUGE_VAL;
  for (const double density : {0.0, 0.01, 0.02, 0.03, 0.05}) {
    QuantizeOptions options;
    options.density = density;
    const auto report = Quantize(dir / "in", dir / ("d" + std::to_string(density)), options);
    FQ_ASSERT_OK(report);
    EXPECT_LE(report->Total().error_with, before);
    before = report->Total().error_with;
  }
}

TEST(CheckpointQuantizerTest, ShapesThatDoNotDivideArePaddedAndSaid) {
  const WorkDir dir;
  SmallModel model;
  model.layers = {{"model.layers.0.mlp.up_proj", 30, 172},
                  {"model.layers.0.mlp.down_proj", 16, 300}};
  WriteSmallModel(model, dir / "in");
  const auto report = Quantize(dir / "in", dir / "out");
  FQ_ASSERT_OK(report);
  EXPECT_EQ(report->group_size, 32);
  EXPECT_THAT(report->notes, testing::Contains(HasSubstr("[30, 172] padded to [32, 192]")));
  const auto original = OpenCheckpoint(dir / "in");
  const auto quantized = OpenCheckpoint(dir / "out");
  EXPECT_EQ(quantized->config["quantization_config"]["true_shapes"]["model.layers.0.mlp.up_proj"],
            nlohmann::json::array({30, 172}));
  for (const LayerReport& layer : report->layers) {
    EXPECT_NEAR(ErrorOfLayer(*original, *quantized, layer.name), layer.error_with,
                1e-6 * layer.error_without);
  }
}

TEST(CheckpointQuantizerTest, LayerThatWouldBeMostlyPaddingStaysInBFloat16AndIsSaid) {
  const WorkDir dir;
  SmallModel model;
  model.layers.push_back({"model.layers.0.mlp.router", 4, 128});
  WriteSmallModel(model, dir / "in");
  const auto report = Quantize(dir / "in", dir / "out");
  FQ_ASSERT_OK(report);
  EXPECT_THAT(report->notes, testing::Contains(HasSubstr("router: kept in BF16")));
  const auto quantized = OpenCheckpoint(dir / "out");
  ASSERT_NE(quantized->tensors->Find("model.layers.0.mlp.router.weight"), nullptr);
  EXPECT_FALSE(IsQuantizedLinear(*quantized->tensors, "model.layers.0.mlp.router"));
}

TEST(CheckpointQuantizerTest, EightBitEmbeddingIsWithinHalfAStepOfTheOriginal) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  QuantizeOptions options;
  options.embedding = TableFormat::kInt8;
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "out", options));
  const auto original = OpenCheckpoint(dir / "in");
  const auto quantized = OpenCheckpoint(dir / "out");
  const TensorInfo* table = quantized->tensors->Find("model.embed_tokens.weight");
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(table->dtype, DType::kI8);
  const auto codes = quantized->tensors->ReadBytes("model.embed_tokens.weight");
  const auto scales = quantized->tensors->ReadBytes("model.embed_tokens.weight_scale");
  FQ_ASSERT_OK(scales);
  std::vector<float> weights(40 * 128);
  FQ_ASSERT_OK(original->tensors->ReadRowsAsFloat(
      *original->tensors->Find("model.embed_tokens.weight"), 0, 40, weights.data()));
  for (size_t row = 0; row < 40; ++row) {
    const float scale =
        ToFloat(BFloat16{static_cast<uint16_t>((*scales)[2 * row] | (*scales)[2 * row + 1] << 8)});
    for (size_t i = row * 128; i < (row + 1) * 128; ++i) {
      const float value = scale * static_cast<float>(static_cast<int8_t>((*codes)[i]));
      // A scale a few BF16 steps short clips the largest weight a little.
      EXPECT_LE(std::fabs(value - weights[i]), 0.51f * scale + 0.02f * std::fabs(weights[i]));
    }
  }
}

TEST(CheckpointQuantizerTest, TiedHeadCanBecomeAnInt4LayerOfItsOwn) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  QuantizeOptions options;
  options.lm_head = TableFormat::kInt4;
  const auto report = Quantize(dir / "in", dir / "out", options);
  FQ_ASSERT_OK(report);
  EXPECT_EQ(report->layers.back().name, "lm_head");
  const auto quantized = OpenCheckpoint(dir / "out");
  EXPECT_TRUE(IsQuantizedLinear(*quantized->tensors, "lm_head"));
  EXPECT_NE(quantized->tensors->Find("model.embed_tokens.weight"), nullptr);
}

TEST(CheckpointQuantizerTest, UntiedHeadStaysBFloat16UnlessAsked) {
  const WorkDir dir;
  SmallModel model;
  model.tied = false;
  WriteSmallModel(model, dir / "in");
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "bf16"));
  EXPECT_EQ(OpenCheckpoint(dir / "bf16")->tensors->Find("lm_head.weight")->dtype, DType::kBF16);
  QuantizeOptions options;
  options.lm_head = TableFormat::kInt8;
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "int8", options));
  EXPECT_EQ(OpenCheckpoint(dir / "int8")->tensors->Find("lm_head.weight")->dtype, DType::kI8);
}

TEST(CheckpointQuantizerTest, AutomaticGroupSizeIsTheLargestThatDividesEveryK) {
  for (const auto& [k, group_size] : {std::pair<int64_t, int64_t>{384, 128}, {192, 64}, {96, 32}}) {
    const WorkDir dir;
    SmallModel model;
    model.layers[1].k = k;
    WriteSmallModel(model, dir / "in");
    const auto report = Quantize(dir / "in", dir / "out");
    FQ_ASSERT_OK(report);
    EXPECT_EQ(report->group_size, group_size);
  }
}

TEST(CheckpointQuantizerTest, QuantizedModelIsNotQuantizedAgain) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "out"));
  EXPECT_THAT(Quantize(dir / "out", dir / "again"),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("quantized already")));
}

TEST(CheckpointQuantizerTest, WeightThatIsNotFiniteIsRefusedAndNothingIsLeft) {
  for (const float bad : {INFINITY, -INFINITY, NAN, 1e20f}) {
    const WorkDir dir;
    SmallModel model;
    model.bad_weight = bad;
    WriteSmallModel(model, dir / "in");
    EXPECT_THAT(
        Quantize(dir / "in", dir / "out"),
        StatusIs(absl::StatusCode::kDataLoss, HasSubstr("down_proj.weight: weight at row")));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1) << "only `in`";
  }
}

TEST(CheckpointQuantizerTest, WhatAKilledRunLeftDoesNotLoadAndTheNextRunRemovesIt) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "reference"));
  // As after a kill: files of the partial folder, config.json not yet there. Process id 1 is not
  // us.
  const std::string partial = dir / "out.partial-1";
  std::filesystem::create_directory(partial);
  std::ofstream(partial + "/shard-0.safetensors.data") << "half";
  std::ofstream(partial + "/tokenizer.json") << "{}";
  EXPECT_FALSE(OpenCheckpoint(partial).ok());
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "out"));
  EXPECT_FALSE(std::filesystem::exists(partial));
  EXPECT_EQ(FolderBytes(dir / "out"), FolderBytes(dir / "reference"));
}

TEST(CheckpointQuantizerTest, ExistingOutputIsReplacedOnlyWhenAsked) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "out"));
  const auto before = FolderBytes(dir / "out");
  QuantizeOptions options;
  options.density = 0.03;
  EXPECT_THAT(Quantize(dir / "in", dir / "out", options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not empty")));
  EXPECT_EQ(FolderBytes(dir / "out"), before);
  options.overwrite = true;
  std::filesystem::create_directory(dir / "out.old");  // somebody's own
  FQ_ASSERT_OK(Quantize(dir / "in", (dir / "out") + "/", options));
  EXPECT_NE(FolderBytes(dir / "out"), before);
  EXPECT_TRUE(std::filesystem::exists(dir / "out.old"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 3);
}

TEST(CheckpointQuantizerTest, OutputMayBeNamedByADotAtTheEnd) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "out"));
  const auto before = FolderBytes(dir / "out");
  QuantizeOptions options;
  options.density = 0.03;
  options.overwrite = true;
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "out/.", options));
  EXPECT_NE(FolderBytes(dir / "out"), before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 2);
}

TEST(CheckpointQuantizerTest, MountPointIsRefusedBeforeTheWork) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  EXPECT_THAT(Quantize(dir / "in", "/proc"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("mount point")));
}

TEST(CheckpointQuantizerTest, OverwriteDoesNotDeleteAFolderThatIsNoModel) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  std::filesystem::create_directory(dir / "photos");
  std::ofstream(dir / "photos/one.jpg") << "precious";
  QuantizeOptions options;
  options.overwrite = true;
  EXPECT_THAT(Quantize(dir / "in", dir / "photos", options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not a model folder")));
  EXPECT_EQ(FileBytes(dir / "photos/one.jpg"), "precious");
}

TEST(CheckpointQuantizerTest, FlippedByteInScalesZerosOrOutliersIsRefused) {
  const WorkDir dir;
  SmallModel model;
  model.layers = {{"model.layers.0.mlp.up_proj", 8, 64}};
  WriteSmallModel(model, dir / "in");
  QuantizeOptions options;
  options.density = 0.05;
  FQ_ASSERT_OK(Quantize(dir / "in", dir / "out", options));
  const std::string path = dir / "out/model.safetensors";
  const std::string intact = FileBytes(path);
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < 8; ++i) {
    header_bytes |= static_cast<uint64_t>(static_cast<uint8_t>(intact[i])) << (8 * i);
  }
  const nlohmann::json header = nlohmann::json::parse(intact.substr(8, header_bytes));
  const auto config = ParseQuantizationConfig(OpenCheckpoint(dir / "out")->config);
  int num_flips = 0;
  for (const char* suffix :
       {".scales", ".zeros", ".outlier_tile_indptr", ".outlier_bucket_info", ".outlier_groups"}) {
    const std::string name = "model.layers.0.mlp.up_proj" + std::string(suffix);
    ASSERT_TRUE(header.contains(name)) << name;
    const size_t begin = 8 + header_bytes + header[name]["data_offsets"][0].get<size_t>();
    const size_t end = 8 + header_bytes + header[name]["data_offsets"][1].get<size_t>();
    for (size_t at = begin; at < end; ++at, ++num_flips) {
      std::string damaged = intact;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
      std::filesystem::remove(path);
      std::ofstream(path, std::ios::binary)
          .write(damaged.data(), static_cast<std::streamsize>(damaged.size()));
      const auto checkpoint = OpenCheckpoint(dir / "out");
      FQ_ASSERT_OK(checkpoint);
      EXPECT_THAT(
          ReadQuantizedLinear(*checkpoint->tensors, **config, "model.layers.0.mlp.up_proj", 8, 64),
          StatusIs(absl::StatusCode::kDataLoss, HasSubstr("up_proj")))
          << name << " byte " << at - begin;
    }
  }
  EXPECT_GT(num_flips, 200);
}

TEST(CheckpointQuantizerTest, ProgressEndsAtTheTotal) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const auto checkpoint = OpenCheckpoint(dir / "in");
  int64_t last = -1;
  int64_t total = 0;
  FQ_ASSERT_OK(QuantizeCheckpoint(*checkpoint, dir / "out", {},
                                  [&](int64_t done, int64_t all, const std::string&) {
                                    EXPECT_GE(done, last);
                                    last = done;
                                    total = all;
                                  }));
  EXPECT_EQ(last, total);
  EXPECT_GT(total, 0);
}

}  // namespace
}  // namespace flashquant
