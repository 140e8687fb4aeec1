// flashquant bench engine through its command line, with a small model on the CPU backend.
#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "engine/base/exit_code.h"
#include "engine/tools/commands.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/quantize/small_checkpoint.h"

namespace flashquant {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

constexpr char kConfig[] = R"({
  "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
  "vocab_size": 512, "max_position_embeddings": 128, "tie_word_embeddings": false})";

class BenchEngineTest : public testing::Test {
 protected:
  void SetUp() override { std::ofstream(work_ / "config.json") << kConfig; }

  void Run(const std::vector<std::string>& flags) {
    CLI::App app;
    AddBenchCommand(app, &exit_code_);
    std::vector<std::string> arguments{"bench", "engine", "--backend", "cpu", "--steps", "2"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them last first
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    app.parse(arguments);
    out_ = testing::internal::GetCapturedStdout();
    err_ = testing::internal::GetCapturedStderr();
  }

  WorkDir work_;
  int exit_code_ = -1;
  std::string out_;
  std::string err_;
};

TEST_F(BenchEngineTest, TimesDecodeAndPrefillBesideBf16WeightsOfTheSameShapes) {
  const std::string csv = work_ / "times.csv";
  Run({"--config", work_ / "config.json", "--batch", "1,3", "--context", "20,40", "--baseline",
       "bf16", "--lm-head", "int4", "--density", "0.02", "--csv", csv});
  ASSERT_EQ(exit_code_, 0) << err_;
  EXPECT_THAT(out_, ContainsRegex("INT4 g128 . [12][.][0-9]+% outliers, head int4: .* GB read"));
  EXPECT_THAT(out_, HasSubstr("BF16: "));
  EXPECT_THAT(out_, HasSubstr("prefill of 40 tokens"));
  EXPECT_THAT(out_, ContainsRegex(" 3 +40 +[0-9.]+ +[0-9.]+ +[0-9.]+x"));

  // Each line of the table: BF16 weights are more bytes, the keys and values the same.
  std::ifstream file(csv);
  std::string line;
  std::getline(file, line);
  EXPECT_THAT(line, HasSubstr("weight_bytes,kv_bytes"));
  int lines = 0;
  while (std::getline(file, line)) {
    ++lines;
    EXPECT_THAT(line, ContainsRegex(lines <= 4 ? "^INT4" : "^BF16"));
    if (lines % 4 == 0) {  // 3 sequences of 40 tokens, 2 layers, K and V, 64 floats
      EXPECT_THAT(line, HasSubstr(",122880,"));
    }
  }
  EXPECT_EQ(lines, 8);
}

TEST_F(BenchEngineTest, AnFP8KvCacheIsAQuarterOfTheBytesOfFloats) {
  const std::string csv = work_ / "times.csv";
  Run({"--config", work_ / "config.json", "--batch", "3", "--context", "40", "--kv-cache-dtype",
       "fp8", "--csv", csv});
  ASSERT_EQ(exit_code_, 0) << err_;
  EXPECT_THAT(out_, HasSubstr("keys and values in F8_E4M3"));
  std::ifstream file(csv);
  std::string line;
  std::getline(file, line);
  std::getline(file, line);
  EXPECT_THAT(line, HasSubstr(",30720,"));  // 122880 / 4
}

TEST_F(BenchEngineTest, BadFlagsAreRefusedByName) {
  Run({"--config", work_.path(), "--batch", "1", "--context", "129"});
  EXPECT_EQ(exit_code_, kExitUsage) << err_;
  EXPECT_THAT(err_, HasSubstr("--context 129"));
  Run({"--batch", "1"});
  EXPECT_THAT(err_, HasSubstr("either --config or --model"));
  Run({"--config", work_ / "config.json", "--batch", "0"});
  EXPECT_THAT(err_, HasSubstr("--batch 0"));
  Run({"--config", work_ / "config.json", "--batch", "1", "--context", "20", "--kv-cache-dtype",
       "int8"});
  EXPECT_THAT(err_, HasSubstr("KV cache dtype 'int8'; auto, bf16 or fp8"));
  Run({"--model", work_.path(), "--batch", "1"});  // no weights there
  EXPECT_NE(exit_code_, 0);
}

}  // namespace
}  // namespace flashquant
