// How long a first token takes beside others, in the time of the steps as they were planned: a step
// takes ten rows' time and that of its rows, as one on a CPU does.
#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/scheduler/scheduler_fixture.h"

namespace flashquant {
namespace {

constexpr int kNumShort = 100;
constexpr int64_t kRowsOfAStep = 10;

class SchedulerLatencyTest : public SchedulerTest {
 protected:
  // 99th percentile of the short requests' time to the first token. All arrive at once, behind the
  // long prompt if there is one.
  int64_t ShortOnesFirstToken(std::optional<int> long_prompt_tokens) {
    SchedulerConfig config;
    config.max_sequences = 128;
    config.token_budget = 256;
    config.block_tokens = 16;
    config.num_blocks = 4000;
    Start(config);
    if (long_prompt_tokens) Add(*long_prompt_tokens, 8);
    std::map<SequenceId, int64_t> first_tokens;
    for (int i = 0; i < kNumShort; ++i) first_tokens[Add(32, 16)] = -1;
    int64_t now = 0;
    while (!Schedule().empty()) {
      now += kRowsOfAStep + plan_.num_rows;
      for (const CommittedToken& token : Commit().tokens) {
        const auto found = first_tokens.find(token.id);
        if (found != first_tokens.end() && token.output_index == 0) found->second = now;
      }
    }
    std::vector<int64_t> times;
    for (const auto& [id, time] : first_tokens) times.push_back(time);
    std::ranges::sort(times);
    EXPECT_GT(times.front(), 0);
    return times[kNumShort * 99 / 100 - 1];
  }
};

// S5
TEST_F(SchedulerLatencyTest, OneLongPromptAtMostDoublesTheFirstTokensOfAHundredShortOnes) {
  const int64_t baseline = ShortOnesFirstToken(std::nullopt);
  const int64_t beside_long = ShortOnesFirstToken(32'000);
  EXPECT_GT(beside_long, baseline);
  EXPECT_LE(beside_long, 2 * baseline);
}

}  // namespace
}  // namespace flashquant
