// What loading refuses before the first request: weights that make no finite numbers (M31), models
// and contexts that do not fit (M29, M30). The folders are copies of a small model, changed in one
// place.
#include "engine/model/served_model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "engine/checkpoint/json.h"
#include "engine/checkpoint/safetensors.h"
#include "tests/engine/tokenizer/tiny_tokenizer.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

class ServedModelTest : public ::testing::Test {
 protected:
  ServedModelTest() {
    std::string pattern = ::testing::TempDir() + "/fq_served_XXXXXX";
    EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    for (const char* name : {"config.json", "generation_config.json", "model.safetensors"}) {
      std::filesystem::copy_file(TestDataPath("tiny_models/llama/") + name, folder_ + "/" + name);
    }
    options_.path = folder_;
    options_.backend = {.kind = "cpu", .num_threads = 1};
    options_.engine.max_sequences = 2;
  }
  ~ServedModelTest() override { std::filesystem::remove_all(folder_); }

  // Puts a NaN (BF16) in the first element.
  void SpoilTensor(std::string_view name) const {
    const std::string path = folder_ + "/model.safetensors";
    const auto file = FileReader::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    const auto header = ReadSafetensorsHeader(**file);
    ASSERT_TRUE(header.ok()) << header.status();
    for (const SafetensorsTensor& tensor : header->tensors) {
      if (tensor.info.name != name) continue;
      std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
      stream.seekp(tensor.file_offset);
      stream.write("\xc0\x7f", 2);
      return;
    }
    FAIL() << "no tensor " << name;
  }

  void SetConfig(const char* key, int64_t value) const {
    const std::string path = folder_ + "/config.json";
    auto config = ReadJsonFile(path);
    ASSERT_TRUE(config.ok()) << config.status();
    (*config)[key] = value;
    std::ofstream(path) << DumpJson(*config);
  }

  std::string folder_;
  ServedModelOptions options_;
};

TEST_F(ServedModelTest, SoundModelGetsARunnerAndAPool) {
  const absl::StatusOr<ServedModel> served = LoadServedModel(options_);
  ASSERT_TRUE(served.ok()) << served.status();
  EXPECT_NE(served->runner, nullptr);
  EXPECT_GE(served->engine.num_blocks, 2);
}

TEST_F(ServedModelTest, TellsWhereTheTimeOfLoadingWentAndWhatTheWeightsTake) {
  const absl::StatusOr<ServedModel> served = LoadServedModel(options_);
  ASSERT_TRUE(served.ok()) << served.status();
  const LoadSeconds& seconds = served->model->weights().load_seconds;
  EXPECT_GT(seconds.read, 0);
  EXPECT_GE(seconds.verify, 0);
  EXPECT_GT(seconds.pack, 0);
  EXPECT_GT(seconds.upload, 0);
  EXPECT_GT(served->warm_up_seconds, 0);
  const auto file = FileReader::Open(folder_ + "/model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  const auto header = ReadSafetensorsHeader(**file);
  ASSERT_TRUE(header.ok()) << header.status();
  int64_t num_bytes = 0;
  for (const SafetensorsTensor& tensor : header->tensors) num_bytes += tensor.info.num_bytes;
  EXPECT_EQ(served->weight_bytes.dense, num_bytes);  // nothing in it is quantized
}

TEST_F(ServedModelTest, NonFiniteWeightIsFoundByTheWarmUp) {
  SpoilTensor("model.norm.weight");
  const absl::StatusOr<ServedModel> served = LoadServedModel(options_);
  EXPECT_EQ(served.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(std::string(served.status().message()), folder_ + ": warm-up: non-finite output");
}

TEST_F(ServedModelTest, ChatTemplateGivesAFormatAndItsEndTokenOrAReason) {
  const auto set_template = [&](const std::string& text) {
    std::ofstream(folder_ + "/tokenizer_config.json") << DumpJson({{"chat_template", text}});
  };
  std::ofstream(folder_ + "/tokenizer.json") << DumpJson(
      TinyTokenizerJson({}, {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}));
  set_template(
      "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
      "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
      "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}");
  const absl::StatusOr<ServedModel> served = LoadServedModel(options_);
  ASSERT_TRUE(served.ok()) << served.status();
  ASSERT_TRUE(served->chat_format.has_value()) << served->chat_refusal;
  EXPECT_EQ(served->chat_format->name(), "llama-3");
  EXPECT_EQ(served->chat_refusal, "");
  EXPECT_EQ(served->defaults.eos_token_ids.back(), 258);

  set_template("{{ '<|user|>' + messages[0].content }}");
  const absl::StatusOr<ServedModel> other = LoadServedModel(options_);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_FALSE(other->chat_format.has_value());
  EXPECT_NE(other->chat_refusal.find("unknown layout ('<|user|>')"), std::string::npos)
      << other->chat_refusal;
}

// The rotary table alone: 2^24 positions of the largest head, on the host and on the backend.
TEST_F(ServedModelTest, ModelBeyondTheFreeMemoryIsRefusedWithBothSizes) {
  const auto backend = CreateBackend(options_.backend);
  ASSERT_TRUE(backend.ok()) << backend.status();
  if ((*backend)->info().free_memory_bytes >= int64_t{128} << 30) {
    GTEST_SKIP() << "needs a machine with less than 128 GiB of free memory";
  }
  SetConfig("max_position_embeddings", 1 << 24);
  SetConfig("head_dim", 1024);
  const absl::StatusOr<ServedModel> served = LoadServedModel(options_);
  EXPECT_EQ(served.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(served.status().message()).find(": needs 131072 MiB, "), std::string::npos)
      << served.status();
}

TEST_F(ServedModelTest, PoolTooSmallForOneContextIsRefused) {
  options_.engine.num_blocks = 2;
  const absl::StatusOr<ServedModel> served = LoadServedModel(options_);
  EXPECT_EQ(served.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(std::string(served.status().message()).starts_with("KV pool: 1 blocks, one request"))
      << served.status();
}

}  // namespace
}  // namespace flashquant
