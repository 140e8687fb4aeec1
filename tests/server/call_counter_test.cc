// What the counter of one call reports: every RPC is counted, streams are those that generate.
#include "engine/base/clock.h"
#include "engine/metrics.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "server/generate_reactor.h"

namespace flashquant {
namespace {

// Sum over all series of a family.
double Sum(const prometheus::Registry& registry, const std::string& name) {
  double sum = 0;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    if (family.name != name) continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      sum += metric.gauge.value + metric.counter.value;
    }
  }
  return sum;
}

TEST(CallCounterTest, OnlyGenerateCallsAreOpenStreams) {
  const SteadyClock clock;
  struct Case {
    RpcMethod method;
    double streams;
  };
  for (const Case& call :
       {Case{RpcMethod::kGenerate, 1}, Case{RpcMethod::kGenerateText, 1},
        Case{RpcMethod::kTokenize, 0}, Case{RpcMethod::kGetModel, 0}, Case{RpcMethod::kOther, 0}}) {
    SCOPED_TRACE(static_cast<int>(call.method));
    prometheus::Registry registry;
    Metrics metrics(registry, "story", 64);
    CallSubmitter submitter(&clock, &metrics, Duration::zero());
    LiveCalls live_calls;
    const CallEnvironment environment = {&submitter, nullptr, &live_calls};
    {
      const CallCounter counter(environment, call.method);
      EXPECT_EQ(live_calls.count(), 1);
      EXPECT_EQ(Sum(registry, "flashquant_streams_open"), call.streams);
    }
    EXPECT_EQ(live_calls.count(), 0);
    EXPECT_EQ(Sum(registry, "flashquant_streams_open"), 0);
    EXPECT_EQ(Sum(registry, "flashquant_requests_received_total"), 1);
    EXPECT_EQ(Sum(registry, "flashquant_requests_finished_total"), 1);
  }
}

}  // namespace
}  // namespace flashquant
