// Percentiles, goodput, warm-up, and the written forms of a load test's result.
#include "server/loadtest/load_report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace flashquant {
namespace {

using testing::HasSubstr;

CallRecord Call(double intended, double first_token, double ended, std::vector<float> gaps = {}) {
  CallRecord call;
  call.intended = call.sent = intended;
  call.first_token = first_token;
  call.ended = ended;
  call.gaps = std::move(gaps);
  call.input_tokens = 10;
  call.output_tokens = 5;
  call.ok = true;
  return call;
}

TEST(PercentilesTest, AreNearestRanks) {
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const Percentiles hundred = PercentilesOf(values);
  EXPECT_EQ(hundred.count, 100);
  EXPECT_EQ(hundred.p50, 50);
  EXPECT_EQ(hundred.p99, 99);
  EXPECT_EQ(hundred.max, 100);
  const Percentiles one = PercentilesOf({7});
  EXPECT_EQ(one.p50, 7);
  EXPECT_EQ(one.p99, 7);
  EXPECT_EQ(PercentilesOf({}).count, 0);
  EXPECT_EQ(PercentilesOf({3, 1, 2}).p90, 3);
}

TEST(LoadReportTest, LatencyCountsFromTheIntendedTimeNotFromTheSending) {
  CallRecord call = Call(1, 3, 4);
  call.sent = 2.5;
  const LoadReport report = MakeReport({call}, 0, {});
  EXPECT_DOUBLE_EQ(report.first_token.max, 2);
  EXPECT_DOUBLE_EQ(report.latency.max, 3);
  EXPECT_DOUBLE_EQ(report.latest_send, 1.5);
}

TEST(LoadReportTest, WhatWasIntendedInTheWarmUpIsLeftOut) {
  const LoadReport report = MakeReport({Call(0, 9, 9), Call(2, 2.5, 7)}, 2, {});
  EXPECT_EQ(report.sent, 1);
  EXPECT_DOUBLE_EQ(report.first_token.max, 0.5);
  EXPECT_DOUBLE_EQ(report.seconds, 5);
  EXPECT_DOUBLE_EQ(report.OutputRate(), 1);
}

TEST(LoadReportTest, GoodputNeedsBothTargetsAndAnOkStatus) {
  CallRecord failed = Call(0, 0.1, 1);
  failed.ok = false;
  failed.error = "RESOURCE_EXHAUSTED QUEUE_FULL";
  const LoadTargets targets{.first_token_seconds = 0.5, .gap_seconds = 0.1};
  const LoadReport report = MakeReport({Call(0, 0.5, 2, {0.05f, 0.1f}), Call(0, 0.6, 2, {0.05f}),
                                        Call(0, 0.1, 2, {0.05f, 0.5f}), Call(0, -1, 2), failed},
                                       0, targets);
  EXPECT_EQ(report.sent, 5);
  EXPECT_EQ(report.ok, 4);
  EXPECT_EQ(report.good, 1);
  EXPECT_DOUBLE_EQ(report.Goodput(), 0.5);
  EXPECT_THAT(report.errors,
              testing::ElementsAre(testing::Pair("RESOURCE_EXHAUSTED QUEUE_FULL", 1)));
  EXPECT_THAT(ReportText(report, targets), HasSubstr("20.0% within the targets"));
}

TEST(LoadReportTest, JsonHasEveryRunWithItsFigures) {
  LoadReport report = MakeReport({Call(0, 0.25, 1, {0.5f})}, 0, {});
  report.offered_rate = 3;
  LoadReport closed = report;
  closed.offered_rate = 0;
  closed.concurrency = 8;
  const auto json = nlohmann::json::parse(ReportsJson({report, closed}, {}));
  ASSERT_EQ(json["runs"].size(), 2u);
  EXPECT_EQ(json["runs"][0]["offered_rate"], 3);
  EXPECT_EQ(json["runs"][0]["first_token_seconds"]["p99"], 0.25);
  EXPECT_EQ(json["runs"][0]["gap_seconds"]["count"], 1);
  EXPECT_EQ(json["runs"][0]["output_tokens_per_second"], 5);
  EXPECT_EQ(json["runs"][1]["concurrency"], 8);
}

TEST(LoadReportTest, ChartHasAPointOfEveryLineForEveryRunAndNoNumberThatIsNone) {
  std::vector<LoadReport> reports;
  for (const double rate : {4.0, 1.0, 2.0}) {
    LoadReport report = MakeReport({Call(0, 0.01 * rate, 1, {0.002f})}, 0, {});
    report.offered_rate = rate;
    reports.push_back(report);
  }
  const std::string svg = ReportsSvg(reports);
  size_t circles = 0;
  for (size_t at = svg.find("<circle"); at != std::string::npos; at = svg.find("<circle", at + 1)) {
    ++circles;
  }
  EXPECT_EQ(circles, 12u);
  EXPECT_TRUE(svg.starts_with("<svg "));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_THAT(svg, testing::Not(HasSubstr("nan")));
  EXPECT_THAT(svg, testing::Not(HasSubstr("inf")));
  // Without a single success there is nothing to draw, but still a chart.
  EXPECT_THAT(ReportsSvg({LoadReport{}}), testing::Not(HasSubstr("nan")));
  EXPECT_THAT(ReportsSvg({}), testing::Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace flashquant
