// Beats of gRPC's callback threads: each is counted, and the end does not wait for the next one.
#include "server/callback_heartbeat.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "gtest/gtest.h"
#include "prometheus/registry.h"

namespace flashquant {
namespace {

using std::chrono::steady_clock;

struct Seen {
  uint64_t beats = 0;
  double delay = 0;
};

Seen Read(const prometheus::Registry& registry) {
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    if (family.name == "flashquant_grpc_callback_delay_seconds") {
      return {family.metric.at(0).histogram.sample_count, family.metric.at(0).histogram.sample_sum};
    }
  }
  ADD_FAILURE() << "no such metric";
  return {};
}

TEST(CallbackHeartbeatTest, BeatsAgainAndAgainAndCountsHowLateEachIs) {
  prometheus::Registry registry;
  Metrics metrics(registry, "m", 64);
  EXPECT_EQ(Read(registry).beats, 0U);
  const auto start = steady_clock::now();
  {
    const CallbackHeartbeat heartbeat(&metrics, std::chrono::milliseconds(5));
    const auto deadline = start + std::chrono::seconds(60);
    while (Read(registry).beats < 5 && steady_clock::now() < deadline) std::this_thread::yield();
  }
  const std::chrono::duration<double> all = steady_clock::now() - start;
  const Seen seen = Read(registry);
  EXPECT_GE(seen.beats, 5U);
  EXPECT_GE(seen.delay, 0);
  // The periods themselves are not in it.
  EXPECT_LT(seen.delay, all.count() - 0.004 * static_cast<double>(seen.beats));
}

TEST(CallbackHeartbeatTest, EndsWithoutWaitingForTheNextBeat) {
  prometheus::Registry registry;
  Metrics metrics(registry, "m", 64);
  const auto start = steady_clock::now();
  { const CallbackHeartbeat heartbeat(&metrics, std::chrono::hours(1)); }
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(60));
  EXPECT_EQ(Read(registry).beats, 0U);
}

}  // namespace
}  // namespace flashquant
