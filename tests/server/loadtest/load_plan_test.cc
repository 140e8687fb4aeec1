// What a load test sends and when: both trace forms, scaling, rates, refusals.
#include "server/loadtest/load_plan.h"

#include <fstream>
#include <iterator>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

LoadPlanOptions Options() {
  LoadPlanOptions options;
  options.context_tokens = 512;
  options.vocabulary_size = 100;
  return options;
}

TEST(ParseTraceTest, TimesAreSecondsAcrossMidnightAndTheEndOfAYear) {
  const auto trace = ParseTrace(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-12-31 23:59:59.5000000,10,2\r\n"
      "2024-01-01 00:00:01,20,3\r\n"
      "2024-02-29 00:00:00,30,4\n"
      "2024-03-01 00:00:00,40,5");
  ASSERT_THAT(trace, IsOk());
  ASSERT_EQ(trace->size(), 4u);
  EXPECT_DOUBLE_EQ((*trace)[1].seconds - (*trace)[0].seconds, 1.5);
  EXPECT_DOUBLE_EQ((*trace)[3].seconds - (*trace)[2].seconds, 86400);
  // `date -ud 2024-02-29 +%s`
  EXPECT_DOUBLE_EQ((*trace)[2].seconds, 1709164800);
  EXPECT_EQ((*trace)[1].input_tokens, 20);
  EXPECT_EQ((*trace)[1].output_tokens, 3);
}

TEST(ParseTraceTest, PlainSecondsAreSorted) {
  const auto trace = ParseTrace("t,i,o\n3.5,1,2\n0.5,3,4\n");
  ASSERT_THAT(trace, IsOk());
  EXPECT_DOUBLE_EQ((*trace)[0].seconds, 0.5);
  EXPECT_EQ((*trace)[0].input_tokens, 3);
}

TEST(ParseTraceTest, ALineThatIsNoneIsNamedByItsNumber) {
  for (const char* line :
       {"1,2", "1,2,3,4", "x,1,2", "1,-1,2", "1,2,-3", "1,2,x", "nan,1,2", "inf,1,2",
        "2023-13-01 00:00:00,1,2", "2023-01-01 24:00:00,1,2", "1,99999999999999999999,2"}) {
    const auto trace = ParseTrace(std::string("t,i,o\n0,1,1\n") + line + "\n");
    EXPECT_THAT(trace.status(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("line 3"))) << line;
  }
  EXPECT_THAT(ParseTrace("").status(), StatusIs(absl::StatusCode::kDataLoss, testing::_));
  EXPECT_THAT(ParseTrace("t,i,o\n").status(), StatusIs(absl::StatusCode::kDataLoss, testing::_));
}

TEST(ParsePromptsTest, EachFormOfTheKnownPromptSetsIsRead) {
  const auto prompts = ParsePrompts(
      "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\r\n\n{\"question\": \"c\", \"answer\": 1}\n"
      "{\"turns\": [\"d\", \"e\"]}");
  ASSERT_THAT(prompts, IsOk());
  EXPECT_THAT(*prompts, testing::ElementsAre("a", "b", "c", "d"));
}

TEST(ParsePromptsTest, ALineWithoutAPromptIsNamedByItsNumber) {
  for (const char* line : {"{}", "[]", "{\"prompt\": \"\"}", "{\"prompt\": 1}", "{\"turns\": []}",
                           "not json", "{\"prompt\": \"a\""}) {
    EXPECT_THAT(ParsePrompts(std::string("{\"prompt\": \"a\"}\n") + line).status(),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("line 2")))
        << line;
  }
}

TEST(MakeLoadPlanTest, ARateGivesThatManyRequestsAndTheSameOnesForASeed) {
  LoadPlanOptions options = Options();
  options.rate = 50;
  options.duration_seconds = 100;
  const auto plan = MakeLoadPlan(options, {}, {});
  ASSERT_THAT(plan, IsOk());
  // Poisson: 5000 expected, four standard deviations are 283.
  EXPECT_NEAR(static_cast<double>(plan->size()), 5000, 283);
  for (size_t i = 1; i < plan->size(); ++i) EXPECT_LE((*plan)[i - 1].seconds, (*plan)[i].seconds);
  const auto again = MakeLoadPlan(options, {}, {});
  ASSERT_EQ(again->size(), plan->size());
  EXPECT_EQ(again->back().seconds, plan->back().seconds);
  EXPECT_EQ(again->back().token_ids, plan->back().token_ids);
  EXPECT_THAT(plan->front().token_ids, testing::SizeIs(64));
  EXPECT_THAT(plan->front().token_ids, testing::Each(testing::Lt(100u)));
}

TEST(MakeLoadPlanTest, UniformArrivalsAreEvenlySpaced) {
  LoadPlanOptions options = Options();
  options.rate = 4;
  options.duration_seconds = 2;
  options.uniform_arrivals = true;
  const auto plan = MakeLoadPlan(options, {}, {});
  ASSERT_THAT(plan, IsOk());
  ASSERT_EQ(plan->size(), 8u);
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_DOUBLE_EQ((*plan)[i].seconds, 0.25 * static_cast<double>(i));
  }
}

TEST(MakeLoadPlanTest, ATraceIsStretchedToTheRateWithItsBurstsAndBeginsAgain) {
  const std::vector<TraceEntry> trace = {{100, 10, 1}, {101, 20, 2}, {104, 30, 3}};
  LoadPlanOptions options = Options();
  options.rate = 0.25;  // three requests with a mean gap of 2 s make a round of 6 s, twice as fast
  options.duration_seconds = 24;
  const auto plan = MakeLoadPlan(options, trace, {});
  ASSERT_THAT(plan, IsOk());
  std::vector<double> times;
  for (const PlannedRequest& request : *plan) times.push_back(request.seconds);
  EXPECT_THAT(times, testing::ElementsAre(0, 2, 8, 12, 14, 20));
  EXPECT_EQ((*plan)[4].token_ids.size(), 20u);
  EXPECT_EQ((*plan)[4].max_output_tokens, 2u);
}

TEST(MakeLoadPlanTest, LengthsAreScaledUntilTheLongestRequestFits) {
  const std::vector<TraceEntry> trace = {{0, 4000, 1000}, {1, 0, 0}, {2, 500, 500}};
  EXPECT_DOUBLE_EQ(LengthScale(trace, 500), 0.1);
  EXPECT_DOUBLE_EQ(LengthScale(trace, 10000), 1);
  LoadPlanOptions options = Options();
  options.context_tokens = 500;
  options.duration_seconds = 3;
  const auto plan = MakeLoadPlan(options, trace, {});
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ((*plan)[0].token_ids.size(), 400u);
  EXPECT_EQ((*plan)[0].max_output_tokens, 100u);
  EXPECT_EQ((*plan)[1].token_ids.size(), 1u);
  EXPECT_EQ((*plan)[1].max_output_tokens, 1u);
}

TEST(MakeLoadPlanTest, LengthsWithoutRoomAndTooManyRequestsAreRefused) {
  LoadPlanOptions options = Options();
  options.rate = 1;
  options.input_tokens = 500;
  EXPECT_THAT(MakeLoadPlan(options, {}, {}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("limit 512, got 500 + 64")));
  options = Options();
  options.rate = 1e6;
  options.duration_seconds = 86400;
  EXPECT_THAT(MakeLoadPlan(options, {{0, 1, 1}}, {}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::_));
}

TEST(ParseTraceTest, ThePublicTracesAreReadWhole) {
  const std::string name = "data/traces/AzureLLMInferenceTrace_conv.csv";
  FQ_SKIP_WITHOUT_SHARED_DATA(name);
  std::ifstream file(SharedDataPath(name), std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto trace = ParseTrace(text);
  ASSERT_THAT(trace, IsOk());
  EXPECT_EQ(trace->size(), 19366u);
  EXPECT_EQ(trace->front().input_tokens, 374);
  EXPECT_EQ(trace->front().output_tokens, 44);
}

}  // namespace
}  // namespace flashquant
