// The windows of a text that perplexity and compare score, and that both give what the model's
// logits say of them.
#include "engine/tools/text_windows.h"

#include <cmath>
#include <fstream>
#include <numeric>
#include <sstream>

#include "engine/model/loaded_model.h"
#include "engine/model/text_scorer.h"
#include "gtest/gtest.h"
#include "tests/engine/quantize/run_command.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/engine/quantize/tiny_llama.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

// Ids 0, 1, 2, ...: a window's first token is where it begins.
std::vector<int32_t> Counting(size_t count) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

TEST(TextWindowsTest, WithoutAStrideWindowsFollowEachOtherAndARestIsDropped) {
  const std::vector<int32_t> tokens = Counting(11);
  const auto windows = CutTextWindows({.context = 4}, tokens);
  FQ_ASSERT_OK(windows);
  ASSERT_EQ(windows->size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ((*windows)[i].tokens.front(), static_cast<int32_t>(4 * i));
    EXPECT_EQ((*windows)[i].tokens.size(), 4u);
    EXPECT_EQ((*windows)[i].first_scored, 1);
  }
}

TEST(TextWindowsTest, OverlappingWindowsScoreEachTokenOnceAndKeepContextBeforeIt) {
  const std::vector<int32_t> tokens = Counting(40);
  for (const int32_t stride : {1, 3, 5, 7}) {
    const auto windows = CutTextWindows({.context = 8, .stride = stride}, tokens);
    FQ_ASSERT_OK(windows);
    int32_t next = 1;  // nothing is before token 0
    for (const TextWindow& window : *windows) {
      EXPECT_EQ(window.tokens.size(), 8u);
      EXPECT_TRUE(window.tokens.front() == 0 || window.first_scored == 8 - stride);
      EXPECT_EQ(window.num_scored(), 8 - window.first_scored);
      for (const int32_t token : window.tokens.subspan(static_cast<size_t>(window.first_scored))) {
        EXPECT_EQ(token, next++);
      }
    }
    EXPECT_GT(next, 40 - stride) << "less than a stride is left over";
  }
}

TEST(TextWindowsTest, AsManyAsAskedForAndErrorsNameTheFlag) {
  const std::vector<int32_t> tokens = Counting(40);
  EXPECT_EQ(CutTextWindows({.context = 8, .stride = 2, .max_windows = 3}, tokens)->size(), 3u);
  EXPECT_THAT(CutTextWindows({.context = 8, .stride = 9}, tokens),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--stride")));
  EXPECT_THAT(CutTextWindows({.context = 41}, tokens),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("lower --context")));
}

// exp of the mean of -ln p over tokens `begin` + first .. of windows that are cut here.
double PerplexityOfLogits(const std::string& model, const std::string& text, size_t context,
                          size_t stride) {
  const auto loaded = LoadModel(model, static_cast<int32_t>(context), {.kind = "cpu"}, nullptr);
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  const auto scorer =
      TextScorer::Create(loaded->model.get(), loaded->backend.get(), static_cast<int32_t>(context));
  EXPECT_TRUE(scorer.ok()) << scorer.status();
  const std::vector<int32_t> tokens = loaded->tokenizer->Encode(text, SpecialText::kPlain);
  std::vector<bool> is_scored(tokens.size(), false);
  double sum = 0;
  int count = 0;
  for (size_t begin = 0; begin + context <= tokens.size(); begin += stride) {
    const absl::Status status = (*scorer)->VisitLogits(
        std::span(tokens).subspan(begin, context), [&](int32_t position, auto logits) {
          const size_t next = begin + static_cast<size_t>(position) + 1;
          if (next == begin + context || is_scored[next]) return;
          is_scored[next] = true;
          double total = 0;
          for (const float logit : logits) total += std::exp(static_cast<double>(logit));
          sum += std::log(total) - static_cast<double>(logits[static_cast<size_t>(tokens[next])]);
          ++count;
        });
    EXPECT_TRUE(status.ok()) << status;
  }
  return std::exp(sum / count);
}

TEST(PerplexityCommandTest, IsThatOfTheLogitsWithAndWithoutAStrideAndComparesTheSame) {
  const WorkDir dir;
  CopyTinyLlama(dir / "model");
  const std::string text = TinyText(230);
  std::ofstream(dir / "text") << text;
  for (const std::string stride : {"48", "20"}) {
    const double expected = PerplexityOfLogits(dir / "model", text, 48, std::stoul(stride));
    const std::vector<std::string> flags = {"--text",   dir / "text", "--context", "48",
                                            "--stride", stride,       "--backend", "cpu"};
    std::vector<std::string> arguments = {"perplexity", "--model", dir / "model"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const CommandResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const size_t at = result.out.find("perplexity ");
    ASSERT_NE(at, std::string::npos) << result.out;
    EXPECT_NEAR(std::stod(result.out.substr(at + 11)), expected, 1e-4 * expected);
    arguments = {"compare", dir / "model", dir / "model"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const CommandResult compared = RunCommand(arguments);
    EXPECT_EQ(compared.exit_code, 0) << compared.err;
    std::istringstream rows(compared.out);
    std::string line;
    std::getline(rows, line);  // windows
    std::getline(rows, line);  // names of the columns
    double perplexity = 0;
    rows >> perplexity;
    EXPECT_NEAR(perplexity, expected, 1e-4 * expected);
    EXPECT_THAT(compared.out, HasSubstr("100.000%"));
  }
}

TEST(PerplexityCommandTest, AStrideAboveTheContextIsAUsageError) {
  const WorkDir dir;
  CopyTinyLlama(dir / "model");
  std::ofstream(dir / "text") << TinyText(100);
  const CommandResult result = RunCommand({"perplexity", "--model", dir / "model", "--text",
                                           dir / "text", "--context", "16", "--stride", "17"});
  EXPECT_EQ(result.exit_code, 64);
  EXPECT_THAT(result.err, HasSubstr("--stride"));
}

}  // namespace
}  // namespace flashquant
