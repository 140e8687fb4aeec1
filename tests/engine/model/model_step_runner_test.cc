// Steps of a small random model on the CPU backend: a decode step as it is recorded (padding rows
// as empty sequences, a logit row for every row) gives the tokens of the plain one.
#include "engine/model/model_step_runner.h"

#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "engine/model/loaded_model.h"
#include "engine/quantize/random_checkpoint.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

constexpr char kConfig[] = R"({
  "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
  "vocab_size": 300, "max_position_embeddings": 256, "tie_word_embeddings": false})";
constexpr int32_t kBlockTokens = 4;

struct Running {
  std::vector<int32_t> tokens;  // known to the host
  std::vector<int32_t> blocks;
  SamplingParams sampling;
};

class ModelStepRunnerTest : public testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(work_ / "config.json") << kConfig;
    auto checkpoint = MakeRandomCheckpoint(work_ / "config.json", {.seed = 3, .quantize = {}});
    FQ_ASSERT_OK(checkpoint);
    auto loaded = LoadModel(*checkpoint, 0, {.kind = "cpu", .num_threads = 2}, nullptr);
    FQ_ASSERT_OK(loaded);
    loaded_ = *std::move(loaded);
  }

  std::unique_ptr<ModelStepRunner> MakeRunner(bool record) {
    auto runner = ModelStepRunner::Create(loaded_.model.get(), loaded_.backend.get(),
                                          {.token_budget = 16,
                                           .row_multiple = 4,
                                           .max_sequences = 6,
                                           .context_length = 64,
                                           .block_tokens = kBlockTokens,
                                           .num_blocks = 64,
                                           .record_decode = record});
    EXPECT_THAT(runner, IsOk());
    return *std::move(runner);
  }

  // `counts`: tokens of each sequence in this step, the last ones of what it has.
  StepPlan Plan(const std::vector<Running>& sequences, const std::vector<int32_t>& counts) {
    StepPlan plan;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Running& running = sequences[i];
      const auto count = static_cast<size_t>(counts[i]);
      plan.sequences.push_back(
          {.id = static_cast<SequenceId>(i),
           .first_position = static_cast<int32_t>(running.tokens.size() - count),
           .token_ids = std::span(running.tokens).last(count),
           .block_ids = running.blocks,
           .samples = true,
           .output_position = static_cast<int64_t>(running.tokens.size()),
           .sampling = &running.sampling,
           .stop = &stop_});
      plan.num_tokens += counts[i];
    }
    plan.num_rows = RoundUp(plan.num_tokens, 4);
    return plan;
  }

  std::vector<Running> MakeSequences() const {
    std::vector<Running> sequences(5);
    for (size_t i = 0; i < sequences.size(); ++i) {
      for (int32_t t = 0; t <= static_cast<int32_t>(i % 3); ++t) {
        sequences[i].tokens.push_back(t * 7 + static_cast<int32_t>(i));
      }
      for (int32_t b = 0; b < 8; ++b) {
        sequences[i].blocks.push_back(1 + b * 5 + static_cast<int32_t>(i));
      }
      sequences[i].sampling.temperature = i % 2 == 0 ? 0.0f : 0.9f;
      sequences[i].sampling.seed = i;
    }
    return sequences;
  }

  static void Append(const StepResult& result, std::vector<Running>* sequences) {
    ASSERT_EQ(result.tokens.size(), sequences->size());
    for (size_t i = 0; i < sequences->size(); ++i) {
      EXPECT_FALSE(result.tokens[i].non_finite);
      (*sequences)[i].tokens.push_back(result.tokens[i].token_id);
    }
  }

  // Tokens of all sequences after a prefill and `steps` decode steps, collected at once.
  std::vector<std::vector<int32_t>> Generate(bool record, int steps) {
    const auto runner = MakeRunner(record);
    std::vector<Running> sequences = MakeSequences();
    std::vector<int32_t> counts;
    for (const Running& running : sequences) {
      counts.push_back(static_cast<int32_t>(running.tokens.size()));
    }
    for (int step = 0; step <= steps; ++step) {
      EXPECT_THAT(runner->Launch(Plan(sequences, counts)), IsOk());
      const auto result = runner->Collect();
      EXPECT_THAT(result, IsOk());
      Append(*result, &sequences);
      counts.assign(sequences.size(), 1);
    }
    std::vector<std::vector<int32_t>> tokens;
    for (const Running& running : sequences) tokens.push_back(running.tokens);
    return tokens;
  }

  WorkDir work_;
  LoadedModel loaded_;
  const StopConditions stop_;
};

TEST_F(ModelStepRunnerTest, RecordedDecodeStepsGiveTheTokensOfPlainOnes) {
  const auto plain = Generate(/*record=*/false, 12);
  EXPECT_EQ(Generate(/*record=*/true, 12), plain);
  EXPECT_NE(plain[0], plain[1]);
}

TEST_F(ModelStepRunnerTest, AStepLaunchedAheadReadsTheTokenThatTheHostHasNotSeen) {
  const auto expected = Generate(/*record=*/true, 2);
  const auto runner = MakeRunner(/*record=*/true);
  std::vector<Running> sequences = MakeSequences();
  std::vector<int32_t> counts;
  for (const Running& running : sequences) {
    counts.push_back(static_cast<int32_t>(running.tokens.size()));
  }
  FQ_ASSERT_OK(runner->Launch(Plan(sequences, counts)));
  for (int step = 0; step < 2; ++step) {
    std::vector<Running> ahead = sequences;
    for (Running& running : ahead) running.tokens.push_back(0);  // not known yet
    StepPlan plan = Plan(ahead, std::vector<int32_t>(ahead.size(), 1));
    for (size_t i = 0; i < plan.sequences.size(); ++i) {
      plan.sequences[i].previous_row = static_cast<int32_t>(i);
    }
    FQ_ASSERT_OK(runner->Launch(plan));
    const auto result = runner->Collect();
    FQ_ASSERT_OK(result);
    Append(*result, &sequences);
  }
  const auto last = runner->Collect();
  FQ_ASSERT_OK(last);
  Append(*last, &sequences);
  for (size_t i = 0; i < sequences.size(); ++i) EXPECT_EQ(sequences[i].tokens, expected[i]);
}

}  // namespace
}  // namespace flashquant
