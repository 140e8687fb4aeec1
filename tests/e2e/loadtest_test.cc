// The load tool against a whole server in this process: every planned call is made and accounted
// for, in both kinds of loop, when the server refuses, and when it never answers.
#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/loadtest/load_plan.h"
#include "server/loadtest/load_report.h"
#include "server/loadtest/load_runner.h"
#include "tests/e2e/test_server.h"

namespace flashquant {
namespace {

std::vector<PlannedRequest> Plan(int count, double spacing, uint32_t output_tokens) {
  std::vector<PlannedRequest> plan;
  for (int i = 0; i < count; ++i) {
    PlannedRequest request;
    request.seconds = i * spacing;
    request.token_ids = {1, 2, static_cast<uint32_t>(i % 200)};
    request.max_output_tokens = output_tokens;
    plan.push_back(request);
  }
  return plan;
}

bool GoOn(const LoadProgress&) { return true; }

LoadRunOptions Options(const TestServer& server) {
  LoadRunOptions options;
  options.target = server.target();
  options.connections = 3;
  return options;
}

TEST(LoadtestTest, EveryPlannedCallIsMadeNotBeforeItsTimeAndItsTokensCounted) {
  TestServer server;
  const auto plan = Plan(60, 0.005, 12);
  const auto records = RunLoad(Options(server), plan, GoOn);
  ASSERT_EQ(records.size(), plan.size());
  for (const CallRecord& call : records) {
    EXPECT_TRUE(call.ok) << call.error;
    EXPECT_EQ(call.input_tokens, 3);
    EXPECT_EQ(call.output_tokens, 12);
    EXPECT_GE(call.sent, call.intended);
    EXPECT_GE(call.first_token, call.sent);
    EXPECT_GE(call.ended, call.first_token);
  }
}

TEST(LoadtestTest, AClosedLoopNeverHasMoreCallsOpenThanAskedFor) {
  TestServer server;
  LoadRunOptions options = Options(server);
  options.concurrency = 5;
  options.duration_seconds = 0.3;
  const auto records = RunLoad(options, Plan(7, 0, 4), GoOn);
  ASSERT_GT(records.size(), 7u) << "the plan is sent again from its start";
  for (const CallRecord& call : records) {
    EXPECT_TRUE(call.ok) << call.error;
    const auto open = std::ranges::count_if(records, [&](const CallRecord& other) {
      return other.sent <= call.sent && other.ended > call.sent;
    });
    EXPECT_LE(open, 5);
  }
}

TEST(LoadtestTest, RefusedCallsAreCountedByCodeAndReason) {
  TestServer server;
  auto plan = Plan(4, 0, 4);
  plan[1].max_output_tokens = 100'000;  // beyond the context
  const LoadReport report = MakeReport(RunLoad(Options(server), plan, GoOn), 0, {});
  EXPECT_EQ(report.ok, 3);
  EXPECT_THAT(report.errors,
              testing::ElementsAre(testing::Pair("INVALID_ARGUMENT CONTEXT_LENGTH_EXCEEDED", 1)));
}

TEST(LoadtestTest, CallsThatAreOpenAfterTheGraceTimeAreCancelledAndFailed) {
  TestServer server;
  LoadRunOptions options = Options(server);
  options.grace_seconds = 0;
  server.runner().CloseGate();  // no step ends, so no call can
  const auto records = RunLoad(options, Plan(3, 0, 20), GoOn);
  server.runner().OpenGate();
  ASSERT_EQ(records.size(), 3u);
  for (const CallRecord& call : records) {
    EXPECT_FALSE(call.ok);
    EXPECT_EQ(call.error, "CANCELLED");
  }
}

TEST(LoadtestTest, AServerThatIsNotThereFailsEveryCall) {
  LoadRunOptions options;
  options.target = "127.0.0.1:1";
  const LoadReport report = MakeReport(RunLoad(options, Plan(5, 0, 4), GoOn), 0, {});
  EXPECT_EQ(report.ok, 0);
  EXPECT_THAT(report.errors, testing::ElementsAre(testing::Pair("UNAVAILABLE", 5)));
}

TEST(LoadtestTest, TheProgressReportEndsTheRunWhenItSaysNo) {
  TestServer server;
  const auto records = RunLoad(Options(server), Plan(100, 60, 4),
                               [](const LoadProgress& progress) { return progress.sent == 0; });
  EXPECT_LT(records.size(), 3u);
}

}  // namespace
}  // namespace flashquant
