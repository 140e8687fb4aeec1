// Steps of a small random model on the CPU backend: a decode step as it is recorded (padding rows
// as empty sequences, a logit row for every row) gives the tokens of the plain one; penalties and
// logprobs follow the logits that a teacher-forced pass over the whole answer gives.
#include "engine/model/model_step_runner.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "engine/model/loaded_model.h"
#include "engine/model/text_scorer.h"
#include "engine/quantize/random_checkpoint.h"
#include "kernels/backend_factory.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/support/reference_ops.h"
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
  size_t num_prompt_tokens = 0;
  std::vector<TokenCount> counts = {};
  std::vector<OutputLogprobs> logprobs = {};

  // As the scheduler counts for a repetition penalty: tokens of the prompt too.
  void Count() {
    counts.clear();
    for (int32_t id = 0; id < 300; ++id) {
      const auto answer = std::span(tokens).subspan(num_prompt_tokens);
      const auto outputs = static_cast<int32_t>(std::ranges::count(answer, id));
      if (std::ranges::count(tokens, id) > 0) counts.push_back({id, outputs});
    }
  }
};

class ModelStepRunnerTest : public testing::Test {
 protected:
  void SetUp() override { Load("cpu"); }
  void Load(const char* kind) {
    std::ofstream(work_ / "config.json") << kConfig;
    auto checkpoint = MakeRandomCheckpoint(work_ / "config.json", {.seed = 3, .quantize = {}});
    FQ_ASSERT_OK(checkpoint);
    auto loaded = LoadModel(*checkpoint, 0, {.kind = kind, .num_threads = 2}, nullptr);
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
           .stop = &stop_,
           .token_counts = running.counts});
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
      sequences[i].num_prompt_tokens = sequences[i].tokens.size();
    }
    return sequences;
  }

  static void Append(const StepResult& result, std::vector<Running>* sequences) {
    ASSERT_EQ(result.tokens.size(), sequences->size());
    for (size_t i = 0; i < sequences->size(); ++i) {
      EXPECT_FALSE(result.tokens[i].non_finite);
      (*sequences)[i].tokens.push_back(result.tokens[i].token_id);
      const auto& asked = (*sequences)[i].sampling.top_logprobs;
      ASSERT_EQ(result.tokens[i].logprobs.has_value(), asked.has_value());
      if (!asked.has_value()) continue;
      EXPECT_EQ(result.tokens[i].logprobs->chosen.token_id, result.tokens[i].token_id);
      EXPECT_EQ(result.tokens[i].logprobs->top.size(), static_cast<size_t>(*asked));
      (*sequences)[i].logprobs.push_back(*result.tokens[i].logprobs);
    }
  }

  // The sequences after a prefill and `steps` decode steps, collected at once.
  std::vector<Running> Run(bool record, int steps, std::vector<Running> sequences) {
    const auto runner = MakeRunner(record);
    std::vector<int32_t> counts;
    for (const Running& running : sequences) {
      counts.push_back(static_cast<int32_t>(running.tokens.size()));
    }
    for (int step = 0; step <= steps; ++step) {
      for (Running& running : sequences) running.Count();
      EXPECT_THAT(runner->Launch(Plan(sequences, counts)), IsOk());
      const auto result = runner->Collect();
      EXPECT_THAT(result, IsOk());
      Append(*result, &sequences);
      counts.assign(sequences.size(), 1);
    }
    return sequences;
  }
  std::vector<std::vector<int32_t>> Generate(bool record, int steps) {
    std::vector<std::vector<int32_t>> tokens;
    for (const Running& running : Run(record, steps, MakeSequences())) {
      tokens.push_back(running.tokens);
    }
    return tokens;
  }

  // Logits after each token, by one pass over all of them.
  std::vector<std::vector<float>> TeacherForced(const std::vector<int32_t>& tokens) {
    auto scorer = TextScorer::Create(loaded_.model.get(), loaded_.backend.get(), 64);
    EXPECT_THAT(scorer, IsOk());
    std::vector<std::vector<float>> logits;
    EXPECT_THAT((*scorer)->VisitLogits(tokens,
                                       [&](int32_t, std::span<const float> row) {
                                         logits.emplace_back(row.begin(), row.end());
                                       }),
                IsOk());
    return logits;
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

// On every backend that this machine has.
class SamplingStepsTest : public ModelStepRunnerTest,
                          public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override { Load(GetParam()); }
  // Between passes over one token and over many.
  double Tolerance() const {
    return loaded_.backend->info().activation_dtype == DType::kF32 ? 1e-4 : 0.15;
  }
};

TEST_P(SamplingStepsTest, PenaltiesBiasesAndLogprobsFollowTheModelsLogits) {
  std::vector<Running> sequences = MakeSequences();
  for (size_t i = 0; i < sequences.size(); ++i) {
    SamplingParams& sampling = sequences[i].sampling;
    sampling.temperature = 0.0f;
    if (i != 1) sampling.repetition_penalty = 1.0f + 0.3f * static_cast<float>(i);
    if (i == 2) sampling.frequency_penalty = 0.5f;
    if (i == 3) sampling.presence_penalty = 1.5f;
    if (i == 4) sampling.logit_bias = {{17, 0.4f}, {40, -1.0f}};
    if (i != 3) sampling.top_logprobs = static_cast<int32_t>(5 * i);
  }
  for (const bool record : {false, true}) {
    for (const Running& running : Run(record, 20, sequences)) {
      const std::vector<std::vector<float>> logits = TeacherForced(running.tokens);
      const SampleRow row = {.repetition_penalty = running.sampling.repetition_penalty,
                             .presence_penalty = running.sampling.presence_penalty,
                             .frequency_penalty = running.sampling.frequency_penalty};
      for (size_t i = running.num_prompt_tokens; i < running.tokens.size(); ++i) {
        const auto prompt_end = running.tokens.begin() + running.num_prompt_tokens;
        const ReferenceHistory history = {
            .prompt = {running.tokens.begin(), prompt_end},
            .answer = {prompt_end, running.tokens.begin() + static_cast<int64_t>(i)},
            .biases = running.sampling.logit_bias};
        const std::vector<double> penalised = ReferencePenalisedLogits(logits[i - 1], row, history);
        const auto drawn = static_cast<size_t>(running.tokens[i]);
        EXPECT_NEAR(penalised[drawn], *std::ranges::max_element(penalised), Tolerance());
        if (!running.sampling.top_logprobs.has_value()) continue;
        const std::vector<double> expected = ReferenceLogprobs(logits[i - 1]);
        const OutputLogprobs& got = running.logprobs[i - running.num_prompt_tokens];
        EXPECT_NEAR(got.chosen.logprob, expected[drawn], Tolerance());
        for (const TokenLogprob& top : got.top) {
          EXPECT_NEAR(top.logprob, expected[static_cast<size_t>(top.token_id)], Tolerance());
        }
        if (!got.top.empty()) {
          EXPECT_NEAR(got.top[0].logprob, *std::ranges::max_element(expected), Tolerance());
        }
      }
    }
  }
}

// Without them this model goes round in circles.
TEST_P(SamplingStepsTest, PenaltiesMakeAnAnswerRepeatLess) {
  std::vector<Running> sequences = MakeSequences();
  const auto distinct = [](const Running& running) {
    const std::set<int32_t> ids(running.tokens.begin(), running.tokens.end());
    return ids.size();
  };
  for (Running& running : sequences) running.sampling.temperature = 0.0f;
  const std::vector<Running> plain = Run(true, 25, sequences);
  for (Running& running : sequences) running.sampling.frequency_penalty = 2.0f;
  const std::vector<Running> penalised = Run(true, 25, sequences);
  size_t plain_total = 0, penalised_total = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    plain_total += distinct(plain[i]);
    penalised_total += distinct(penalised[i]);
  }
  EXPECT_GT(penalised_total, plain_total);
}

// What is queued without being run at once (record_decode) cannot be told apart by the host.
TEST_F(ModelStepRunnerTest, TimesOfAStepAreToldByPartWhereOpsRunAtOnce) {
  for (const bool record : {false, true}) {
    const std::unique_ptr<ModelStepRunner> runner = MakeRunner(record);
    const TimePoint begin = SteadyClock().Now();
    const std::vector<Running> sequences = {{.tokens = {1, 2, 3}, .blocks = {1}}};
    FQ_ASSERT_OK(runner->Launch(Plan(sequences, {3})));
    FQ_ASSERT_OK(runner->Collect());
    const Duration whole = SteadyClock().Now() - begin;
    const StepTimes times = runner->last_times();
    EXPECT_GT(times.upload, Duration::zero());
    EXPECT_EQ(times.sample > Duration::zero(), !record);
    EXPECT_EQ(times.download > Duration::zero(), !record);
    EXPECT_LT(times.upload + times.sample + times.download, whole);
  }
}

std::vector<const char*> Backends() {
  if (CreateBackend({.kind = "cuda"}).ok()) return {"cpu", "cuda"};
  return {"cpu"};
}
INSTANTIATE_TEST_SUITE_P(Backends, SamplingStepsTest, testing::ValuesIn(Backends()));

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
