// Checkpoints of random weights: they load and run, are the same for a seed whatever reads them,
// and have the shapes and densities that were asked for.
#include "engine/quantize/random_checkpoint.h"

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "engine/checkpoint/quantized_tensors.h"
#include "engine/model/loaded_model.h"
#include "engine/model/served_model.h"
#include "engine/model/text_scorer.h"
#include "tests/engine/quantize/small_checkpoint.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

// Sizes that are no multiples of a tile, of a group or of 8 rows.
constexpr char kConfig[] = R"({
  "architectures": ["LlamaForCausalLM"], "hidden_size": 320, "intermediate_size": 588,
  "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64,
  "vocab_size": 515, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
  "attention_bias": true, "tie_word_embeddings": false})";

class RandomCheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    config_path_ = work_ / "config.json";
    std::ofstream(config_path_) << kConfig;
    options_.seed = 5;
    options_.quantize.density = 0.02;
    options_.quantize.num_threads = 2;
  }
  Checkpoint Make() {
    auto checkpoint = MakeRandomCheckpoint(config_path_, options_);
    EXPECT_THAT(checkpoint, IsOk());
    return *std::move(checkpoint);
  }
  static std::vector<uint8_t> Bytes(const Checkpoint& checkpoint, std::string_view name) {
    auto bytes = checkpoint.tensors->ReadBytes(name);
    EXPECT_THAT(bytes, IsOk());
    return *std::move(bytes);
  }

  WorkDir work_;
  std::string config_path_;
  RandomWeightOptions options_;
};

TEST_F(RandomCheckpointTest, ASeedGivesTheSameBytesForAnyNumberOfThreadsAndAnotherSeedOthers) {
  const Checkpoint first = Make();
  options_.quantize.num_threads = 1;
  const Checkpoint again = Make();
  options_.seed = 6;
  const Checkpoint other = Make();
  ASSERT_EQ(first.tensors->tensors().size(), again.tensors->tensors().size());
  for (const TensorInfo& tensor : first.tensors->tensors()) {
    EXPECT_EQ(Bytes(first, tensor.name), Bytes(again, tensor.name)) << tensor.name;
  }
  const std::string codes = "model.layers.1.mlp.up_proj.qweight";
  EXPECT_NE(Bytes(first, codes), Bytes(other, codes));
  EXPECT_NE(Bytes(first, codes), Bytes(first, "model.layers.0.mlp.up_proj.qweight"));
}

TEST_F(RandomCheckpointTest, RowsReadAloneAreThoseOfTheWholeTensor) {
  const Checkpoint checkpoint = Make();
  for (const TensorInfo& tensor : checkpoint.tensors->tensors()) {
    const std::vector<uint8_t> whole = Bytes(checkpoint, tensor.name);
    const int64_t rows = tensor.num_rows();
    const size_t row_bytes = whole.size() / static_cast<size_t>(rows);
    for (const int64_t row : {int64_t{0}, rows / 2, rows - 1}) {
      const int64_t count = std::min<int64_t>(2, rows - row);
      std::vector<uint8_t> part(static_cast<size_t>(count) * row_bytes);
      FQ_ASSERT_OK(checkpoint.tensors->ReadRows(tensor, row, count, part.data()));
      const auto begin = whole.begin() + row * static_cast<std::ptrdiff_t>(row_bytes);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), begin)) << tensor.name << " row " << row;
    }
  }
}

TEST_F(RandomCheckpointTest, TheWrittenFolderKeepsEveryRuleHasTheAskedForDensityAndRuns) {
  options_.quantize.lm_head = TableFormat::kInt4;
  options_.quantize.embedding = TableFormat::kInt8;
  const Checkpoint made = Make();
  FQ_ASSERT_OK(WriteCheckpoint(made, work_ / "model", nullptr));

  const auto folder = OpenCheckpoint(work_ / "model");
  FQ_ASSERT_OK(folder);
  const auto config = ParseModelConfig(*folder);
  FQ_ASSERT_OK(config);
  ASSERT_TRUE(config->quantization.has_value());
  EXPECT_NEAR(config->quantization->stored_density, 0.02, 0.0005);
  const auto head =
      ReadQuantizedLinear(*folder->tensors, *config->quantization, "lm_head", 515, 320);
  FQ_ASSERT_OK(head);
  ASSERT_TRUE(head->outliers.has_value());
  EXPECT_NEAR(head->outliers->stored_density(), 0.02, 0.001);
  for (const TensorInfo& tensor : folder->tensors->tensors()) {
    EXPECT_THAT(folder->tensors->VerifyChecksum(tensor), IsOk());
    EXPECT_EQ(Bytes(*folder, tensor.name), Bytes(made, tensor.name)) << tensor.name;
  }

  const auto loaded = LoadModel(work_ / "model", 0, {.kind = "cpu", .num_threads = 2}, nullptr);
  FQ_ASSERT_OK(loaded);
  const auto scorer = TextScorer::Create(loaded->model.get(), loaded->backend.get(), 8);
  FQ_ASSERT_OK(scorer);
  const auto loss = (*scorer)->NegativeLogLikelihood(std::vector<int32_t>{1, 2, 3, 400, 5});
  FQ_ASSERT_OK(loss);
  EXPECT_TRUE(std::isfinite(*loss));
}

TEST_F(RandomCheckpointTest, AModelLoadsFromTheMadeBytesWithoutAFolder) {
  for (const bool int4 : {true, false}) {
    options_.int4 = int4;
    const auto loaded = LoadModel(Make(), 0, {.kind = "cpu", .num_threads = 1}, nullptr);
    FQ_ASSERT_OK(loaded);
    EXPECT_EQ(loaded->config.quantization.has_value(), int4);
    EXPECT_EQ(loaded->model->weights().layers.size(), 2u);
  }
}

TEST_F(RandomCheckpointTest, BadOptionsAndConfigurationsAreRefusedByName) {
  options_.quantize.density = 0.5;
  EXPECT_THAT(MakeRandomCheckpoint(config_path_, options_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--density")));
  options_.quantize.density = 0;
  options_.quantize.group_size = 48;
  EXPECT_THAT(MakeRandomCheckpoint(config_path_, options_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--group-size")));
  options_.quantize.group_size = 32;
  EXPECT_THAT(MakeRandomCheckpoint(work_ / "nothing.json", options_),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("nothing.json")));
  EXPECT_TRUE(MakeRandomCheckpoint(work_.path(), options_).ok());  // a folder will do
}

}  // namespace
}  // namespace flashquant
