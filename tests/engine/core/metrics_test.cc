// Names, labels, counts and the guards of the metrics.
#include "engine/metrics.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/process_collector.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "tests/support/fake_step_runner.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

using Labels = std::map<std::string, std::string>;

// The value of the series with all of `labels` (others may be there too); NaN when it is missing.
double Value(const prometheus::Registry& registry, const std::string& name,
             const Labels& labels = {}) {
  for (const MetricFamily& family : registry.Collect()) {
    if (family.name != "flashquant_" + name) continue;
    for (const ClientMetric& metric : family.metric) {
      size_t matches = 0;
      for (const auto& label : metric.label) {
        const auto wanted = labels.find(label.name);
        if (wanted != labels.end() && wanted->second == label.value) ++matches;
      }
      if (matches != labels.size()) continue;
      switch (family.type) {
        case MetricType::Counter:
          return metric.counter.value;
        case MetricType::Histogram:
          return static_cast<double>(metric.histogram.sample_count);
        default:
          return metric.gauge.value;
      }
    }
  }
  return std::nan("");
}

TEST(MetricsTest, EveryNameFollowsTheRules) {
  prometheus::Registry registry;
  const Metrics metrics(registry, "story", 512);
  const std::set<std::string> of_process = {"flashquant_log_messages_total",
                                            "flashquant_auth_failures_total",
                                            "flashquant_grpc_callback_delay_seconds"};
  size_t num_series = 0;
  for (const MetricFamily& family : registry.Collect()) {
    SCOPED_TRACE(family.name);
    EXPECT_TRUE(family.name.starts_with("flashquant_"));
    EXPECT_EQ(family.name.find(':'), std::string::npos);
    EXPECT_EQ(family.type == MetricType::Counter, family.name.ends_with("_total"));
    EXPECT_FALSE(family.help.empty());
    EXPECT_FALSE(family.name.ends_with("_ms"));
    for (const ClientMetric& metric : family.metric) {
      std::set<std::string> names;
      for (const auto& label : metric.label) {
        EXPECT_NE(label.name, "le");
        names.insert(label.name);
      }
      EXPECT_EQ(names.contains("model"), !of_process.contains(family.name));
      num_series += family.type == MetricType::Histogram ? metric.histogram.bucket.size() + 2 : 1;
    }
  }
  EXPECT_LT(num_series, 1000u);
}

TEST(MetricsTest, NoLabelMakesANewSeriesAfterTheStart) {
  prometheus::Registry registry;
  Metrics metrics(registry, "story", 512);
  const auto count = [&] {
    size_t total = 0;
    for (const MetricFamily& family : registry.Collect()) total += family.metric.size();
    return total;
  };
  const size_t before = count();
  metrics.RequestReceived(RpcMethod::kOther);
  metrics.RequestFinished(RpcMethod::kGenerate, absl::StatusCode::kUnauthenticated);
  metrics.RequestFinished(RpcMethod::kGenerate, static_cast<absl::StatusCode>(99));
  metrics.RequestRejected(RejectReason::kNotReady);
  metrics.GenerationFinished(GenerationEnd::kError);
  metrics.StreamAborted(StreamAbort::kDrain);
  metrics.LogMessage(LogLevel::kCritical);
  EXPECT_EQ(count(), before);
  EXPECT_EQ(Value(registry, "requests_finished_total",
                  {{"method", "Generate"}, {"code", "UNAUTHENTICATED"}}),
            2);
}

TEST(MetricsTest, BucketsAreTheDocumentedOnesAndTokensEndAtTheContext) {
  prometheus::Registry registry;
  Metrics metrics(registry, "story", 300);
  metrics.ObserveRequestTokens(7, 250, 300);
  metrics.ObserveTimeToFirstToken(std::chrono::milliseconds(3));
  for (const MetricFamily& family : registry.Collect()) {
    std::vector<double> bounds;
    if (family.type == MetricType::Histogram) {
      for (const auto& bucket : family.metric[0].histogram.bucket) {
        bounds.push_back(bucket.upper_bound);
      }
    }
    const double infinity = std::numeric_limits<double>::infinity();
    if (family.name == "flashquant_request_input_tokens") {
      EXPECT_THAT(bounds, testing::ElementsAre(1, 2, 5, 10, 20, 50, 100, 200, infinity));
    }
    if (family.name == "flashquant_time_to_first_token_seconds") {
      EXPECT_THAT(bounds,
                  testing::ElementsAre(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
                                       0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, infinity));
    }
    if (family.name == "flashquant_engine_step_rows") {
      EXPECT_THAT(bounds, testing::ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96,
                                               128, infinity));
    }
  }
}

// O4
TEST(MetricsTest, OddValuesNeverReachTheExposition) {
  prometheus::Registry registry;
  Metrics metrics(registry, "story", 512);
  metrics.ObserveTimePerOutputToken(Duration(10), Duration(5), 1);  // no gap: would divide by 0
  metrics.ObserveTimePerOutputToken(Duration(5), Duration(10), 3);
  metrics.ObserveInterTokenLatency(Duration(-7));
  metrics.SetKvBlocks(0, 0, 0, 0);  // an empty pool: would divide by 0
  metrics.AddOutputTokens(-5);
  EXPECT_EQ(Value(registry, "time_per_output_token_seconds"), 1);
  EXPECT_EQ(Value(registry, "output_tokens_total"), 0);
  for (const MetricFamily& family : registry.Collect()) {
    for (const ClientMetric& metric : family.metric) {
      EXPECT_TRUE(std::isfinite(metric.gauge.value));
      EXPECT_TRUE(std::isfinite(metric.counter.value));
      EXPECT_TRUE(std::isfinite(metric.histogram.sample_sum));
      EXPECT_GE(metric.histogram.sample_sum, 0);
    }
  }
}

TEST(MetricsTest, InfoMetricsCarryTheirFactsAsLabels) {
  prometheus::Registry registry;
  Metrics metrics(registry, "story", 512);
  metrics.SetModelInfo("flashquant", "128", "0.03", "r1");
  metrics.SetBuildInfo("0.1.0", "abc", "cpu", "none", "1.51.1");
  EXPECT_EQ(Value(registry, "model_info", {{"group_size", "128"}, {"model", "story"}}), 1);
  EXPECT_EQ(Value(registry, "build_info", {{"backend", "cpu"}}), 1);
  for (const MetricFamily& family : registry.Collect()) {
    if (family.name != "flashquant_build_info") continue;
    for (const auto& label : family.metric[0].label) EXPECT_NE(label.name, "model");
  }
}

TEST(MetricsTest, LoadingIsToldByStageAndWeightsByWhatTheyHold) {
  prometheus::Registry registry;
  Metrics metrics(registry, "story", 512);
  metrics.SetModelLoadDuration(LoadStage::kRead, 0.5);
  metrics.SetModelLoadDuration(LoadStage::kVerify, 0.25);
  metrics.SetModelLoadDuration(LoadStage::kPack, 2);
  metrics.SetModelLoadDuration(LoadStage::kUpload, 0.125);
  metrics.SetModelLoadDuration(LoadStage::kWarmUp, 1);
  metrics.SetModelLoadDuration(LoadStage::kTotal, 4);
  metrics.SetModelWeightBytes(WeightKind::kPacked, 1000);
  metrics.SetModelWeightBytes(WeightKind::kScales, 100);
  metrics.SetModelWeightBytes(WeightKind::kOutliers, 10);
  metrics.SetModelWeightBytes(WeightKind::kDense, 1);
  const std::pair<const char*, double> stages[] = {
      {"read", 0.5}, {"verify", 0.25}, {"pack", 2}, {"upload", 0.125}, {"warmup", 1}, {"total", 4}};
  for (const auto& [stage, seconds] : stages) {
    EXPECT_EQ(Value(registry, "model_load_duration_seconds", {{"stage", stage}}), seconds);
  }
  EXPECT_EQ(Value(registry, "model_weight_bytes", {{"kind", "packed"}}), 1000);
  EXPECT_EQ(Value(registry, "model_weight_bytes", {{"kind", "scales"}}), 100);
  EXPECT_EQ(Value(registry, "model_weight_bytes", {{"kind", "outliers"}}), 10);
  EXPECT_EQ(Value(registry, "model_weight_bytes", {{"kind", "dense"}}), 1);
}

// S14
TEST(MetricsTest, CountsBeyond32BitsStayExact) {
  prometheus::Registry registry;
  Metrics metrics(registry, "story", 512);
  for (int i = 0; i < 3; ++i) {
    metrics.AddOutputTokens((int64_t{1} << 32) + 1);
    metrics.AddInputTokens(InputTokens::kCached, (int64_t{1} << 40) + 1);
    metrics.AddPrefixCacheLookup((int64_t{1} << 33) + 1, 1);
  }
  EXPECT_EQ(Value(registry, "output_tokens_total"), 3.0 * 4294967297);
  EXPECT_EQ(Value(registry, "input_tokens_total", {{"kind", "cached"}}), 3.0 * 1099511627777);
  EXPECT_EQ(Value(registry, "prefix_cache_lookup_tokens_total", {{"result", "hit"}}),
            3.0 * 8589934593);
}

// The numbers of an engine that has answered six requests at once with too few blocks for all.
class EngineNumbersTest : public ::testing::Test {
 protected:
  static constexpr int kNumRequests = 6;
  static constexpr int kPromptTokens = 4;
  static constexpr int kOutputTokens = 20;
  static constexpr int kUsableBlocks = 16;  // each request needs 6

  void SetUp() override {
    EngineConfig config;
    config.context_length = 64;
    config.max_sequences = 8;
    config.token_budget = 32;
    config.block_tokens = 4;
    config.num_blocks = kUsableBlocks + 1;  // the null block
    config.row_multiple = 8;
    config.run_ahead = true;
    FakeStepRunner runner(config.num_blocks, config.block_tokens);
    runner.OnLaunch([&](const StepPlan& plan) { rows_launched_ += plan.num_rows; });
    EngineDependencies dependencies;
    dependencies.runner = &runner;
    dependencies.metrics = &metrics_;
    auto engine = Engine::Create(config, dependencies);
    FQ_ASSERT_OK(engine);
    std::vector<std::shared_ptr<RequestStream>> streams;
    runner.CloseGate();  // so that all of them run at once
    for (int i = 0; i < kNumRequests; ++i) {
      GenerateRequest request;
      request.request_id = std::to_string(i);
      request.prompt_tokens = {1, 2, 3, i};
      request.stop.max_output_tokens = kOutputTokens;
      auto stream = (*engine)->Submit(request);
      FQ_ASSERT_OK(stream);
      streams.push_back(*stream);
    }
    runner.OpenGate();
    EXPECT_TRUE((*engine)->Drain(std::chrono::steady_clock::now() + std::chrono::seconds(60)));
    engine->reset();
    steps_launched_ = runner.num_launched();
  }

  double Of(const std::string& name, const Labels& labels = {}) {
    return Value(registry_, name, labels);
  }
  // Prefill and decode together.
  double OfPhases(const std::string& name, Labels labels = {}) {
    labels["phase"] = "prefill";
    const double prefill = Of(name, labels);
    labels["phase"] = "decode";
    return prefill + Of(name, labels);
  }

  prometheus::Registry registry_;
  Metrics metrics_{registry_, "story", 64};
  int64_t rows_launched_ = 0;
  int64_t steps_launched_ = 0;
};

TEST_F(EngineNumbersTest, TokensAndEndsAreThoseOfTheRequests) {
  EXPECT_EQ(Of("generations_finished_total", {{"reason", "length"}}), kNumRequests);
  EXPECT_EQ(Of("output_tokens_total"), kNumRequests * kOutputTokens);
  EXPECT_EQ(Of("input_tokens_total", {{"kind", "computed"}}), kNumRequests * kPromptTokens);
  EXPECT_GE(Of("prefix_cache_lookup_tokens_total", {{"result", "miss"}}),
            kNumRequests * kPromptTokens);
  EXPECT_EQ(Of("requests_running"), 0);
}

TEST_F(EngineNumbersTest, StepsAndRowsAreThoseThatWereLaunched) {
  EXPECT_EQ(OfPhases("engine_steps_total"), static_cast<double>(steps_launched_));
  const double real = OfPhases("engine_rows_total", {{"kind", "real"}});
  EXPECT_EQ(real + OfPhases("engine_rows_total", {{"kind", "padding"}}),
            static_cast<double>(rows_launched_));
  // Every real row is a prompt token, an output token that was fed back, or one computed again.
  const double recomputed = Of("input_tokens_total", {{"kind", "recomputed"}});
  EXPECT_EQ(real, kNumRequests * (kPromptTokens + kOutputTokens - 1) + recomputed);
  EXPECT_EQ(Of("engine_row_multiple", {{"phase", "decode"}}), 8);
}

TEST_F(EngineNumbersTest, BlocksSumToThePoolAndTooFewOfThemPreempt) {
  EXPECT_GT(Of("preemptions_total", {{"cause", "kv_pressure"}}), 0);
  EXPECT_EQ(Of("preemptions_total", {{"cause", "priority"}}), 0);
  EXPECT_EQ(Of("kv_blocks", {{"state", "used"}}), 0);
  EXPECT_GT(Of("kv_blocks", {{"state", "cached"}}), 0);
  EXPECT_EQ(Of("kv_blocks", {{"state", "free"}}) + Of("kv_blocks", {{"state", "cached"}}),
            kUsableBlocks);
  EXPECT_EQ(Of("kv_blocks_unaccounted"), 0);
}

TEST_F(EngineNumbersTest, StagesOfAStepTookTime) {
  for (const char* stage : {"schedule", "forward", "deliver"}) {
    EXPECT_GT(Of("engine_step_stage_seconds_total", {{"phase", "decode"}, {"stage", stage}}), 0)
        << stage;
  }
}

TEST(ProcessCollectorTest, ReportsTheUsualValues) {
  const ProcessCollector collector;
  std::map<std::string, double> values;
  for (const MetricFamily& family : collector.Collect()) {
    ASSERT_EQ(family.metric.size(), 1u);
    values[family.name] = family.type == MetricType::Counter ? family.metric[0].counter.value
                                                             : family.metric[0].gauge.value;
  }
  EXPECT_EQ(values.size(), 6u);
  EXPECT_GT(values["process_resident_memory_bytes"], 1e5);
  EXPECT_GE(values["process_cpu_seconds_total"], 0);
  EXPECT_GE(values["process_open_fds"], 3);
  EXPECT_GE(values["process_max_fds"], values["process_open_fds"]);
  EXPECT_GE(values["process_threads"], 1);
  EXPECT_GT(values["process_start_time_seconds"], 1.5e9);
}

}  // namespace
}  // namespace flashquant
