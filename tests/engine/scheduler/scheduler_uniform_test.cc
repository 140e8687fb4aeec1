// uniform_steps: what a sequence's tokens run in is what they run in when it is alone.
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/engine/scheduler/scheduler_fixture.h"

namespace flashquant {
namespace {

using testing::ElementsAre;
using testing::Pair;

// A sequence's part in a step: first position, tokens, rows of the step.
using Part = std::tuple<int32_t, size_t, int32_t>;
using Parts = std::map<SequenceId, std::vector<Part>>;

class UniformStepsTest : public SchedulerTest {
 protected:
  static SchedulerConfig UniformConfig() {
    SchedulerConfig config = Config();
    config.uniform_steps = true;
    config.row_multiple = 4;
    return config;
  }
  // Notes the parts of the plan that was made last.
  void Note(Parts* parts) const {
    for (const SequenceStep& step : plan_.sequences) {
      (*parts)[step.id].push_back({step.first_position, step.token_ids.size(), plan_.num_rows});
      if (step.token_ids.size() > 1) {
        EXPECT_EQ(plan_.sequences.size(), 1u);
      }
    }
  }
  // Runs until nothing is left, with a step in flight when `ahead`.
  void RunToTheEnd(bool ahead, Parts* parts) {
    for (bool any = true; any;) {
      const bool scheduled = !Schedule().empty();
      Note(parts);
      // What a step in flight still holds may be what the next one waits for.
      const bool collect = scheduler_->num_uncommitted() > (ahead && scheduled ? 1 : 0);
      if (collect) Commit();
      any = scheduled || collect;
    }
  }
};

TEST_F(UniformStepsTest, AChunkIsAloneAndTakesTheWholeBudget) {
  Start(UniformConfig());
  const SequenceId first = Add(11, 5);
  const SequenceId second = Add(10, 5);
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 8)));
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 3)));
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 1)));  // chunks and decodes take turns
  EXPECT_THAT(Step(), ElementsAre(Pair(second, 8)));
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 1)));
  EXPECT_THAT(Step(), ElementsAre(Pair(second, 2)));
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 1), Pair(second, 1)));
  EXPECT_EQ(plan_.num_rows, 4);
}

TEST_F(UniformStepsTest, APromptOfOneTokenIsADecode) {
  Start(UniformConfig());
  const SequenceId first = Add(1, 3);
  const SequenceId second = Add(1, 3);
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 1), Pair(second, 1)));
}

TEST_F(UniformStepsTest, NobodyIsAdmittedWhoseWholeLengthHasNoRoom) {
  SchedulerConfig config = UniformConfig();
  config.num_blocks = 11;  // 10 usable, two tokens each
  Start(config);
  const SequenceId first = Add(4, 9);   // six blocks in the end
  const SequenceId second = Add(4, 9);  // would fit now
  EXPECT_THAT(Step(), ElementsAre(Pair(first, 4)));
  for (int i = 0; i < 8; ++i) EXPECT_THAT(Step(), ElementsAre(Pair(first, 1)));
  EXPECT_THAT(Step(), ElementsAre(Pair(second, 4)));
  EXPECT_EQ(scheduler_->counters().preemptions_for_blocks, 0);
}

// Random arrivals over a small pool, priorities among them: every sequence's steps are those of its
// solo run.
TEST_F(UniformStepsTest, StepsOfASequenceAreThoseOfItsSoloRun) {
  for (const bool ahead : {false, true}) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
      std::mt19937 random(seed);
      const auto draw = [&](int low, int high) {
        return std::uniform_int_distribution<int>(low, high)(random);
      };
      Start(UniformConfig());
      Parts together;
      std::map<SequenceId, std::pair<int, int>> lengths;
      for (int i = 0; i < 12; ++i) {
        const int prompt = draw(1, 30);
        const int output = draw(1, 20);
        const SequenceId id =
            Add({.prompt_tokens = std::vector<int32_t>(static_cast<size_t>(prompt), 5),
                 .max_output_tokens = output,
                 .priority = draw(-1, 1)});
        lengths[id] = {prompt, output};
        for (int steps = draw(0, 6); steps > 0; --steps) {
          if (!Schedule().empty()) Note(&together);
          while (scheduler_->num_uncommitted() > (ahead ? 1 : 0)) Commit();
        }
      }
      RunToTheEnd(ahead, &together);
      ASSERT_EQ(together.size(), lengths.size());
      EXPECT_EQ(scheduler_->counters().tokens_recomputed, 0);
      for (const auto& [id, length] : lengths) {
        Start(UniformConfig());
        Parts alone;
        const SequenceId solo = Add(length.first, length.second);
        RunToTheEnd(ahead, &alone);
        EXPECT_EQ(together[id], alone[solo]) << "seed " << seed << ", sequence " << id;
      }
    }
  }
}

}  // namespace
}  // namespace flashquant
