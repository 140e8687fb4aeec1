// Many streams at once over a real model: each answer is that of the same request run alone,
// whatever shares its batch and whoever cancels; nothing is left behind; the metrics add up.
#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "tests/e2e/exposition.h"
#include "tests/e2e/model_server.h"
#include "tests/e2e/test_server.h"

namespace flashquant {
namespace {

using namespace std::chrono_literals;

constexpr int kNumStreams = 64;
constexpr int kRowMultiple = 8;
constexpr int32_t kMaxOutput = 40;

struct Stream {
  v1::GenerateRequest request;
  int cancel_after = -1;  // tokens; -1: never
  Answer alone;
  Answer together;
};

std::vector<Stream> MakeStreams(int32_t vocab_size, std::mt19937* random) {
  const auto draw = [&](uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>((*random)() % (high - low + 1));
  };
  std::vector<Stream> streams(kNumStreams);
  for (int i = 0; i < kNumStreams; ++i) {
    v1::GenerateRequest& request = streams[static_cast<size_t>(i)].request;
    const uint32_t prompt = draw(1, 20);
    for (uint32_t t = 0; t < prompt; ++t) {
      request.mutable_token_ids()->add_ids(draw(0, static_cast<uint32_t>(vocab_size) - 1));
    }
    request.mutable_output()->set_token_ids(true);
    request.mutable_stop()->set_max_output_tokens(draw(1, kMaxOutput));
    // Half greedy, half seeded.
    request.mutable_sampling()->set_temperature(i % 2 == 0 ? 0.0f : 0.9f);
    request.mutable_sampling()->set_seed((*random)());
    if (draw(1, 5) == 1) {
      streams[static_cast<size_t>(i)].cancel_after =
          static_cast<int>(draw(0, request.stop().max_output_tokens()));
    }
  }
  return streams;
}

double Finished(const Exposition& metrics) {
  return metrics.Sum("flashquant_requests_finished_total");
}

// Rows computed by answers that ran alone and undisturbed: each prompt token once, and each output
// token but the last.
double RowsOf(const std::vector<Stream>& streams) {
  double rows = 0;
  for (const Stream& stream : streams) {
    rows += stream.request.token_ids().ids_size();
    rows += static_cast<double>(stream.alone.ids.size()) - 1;
  }
  return rows;
}

void CheckTogether(const Stream& stream) {
  const Answer& alone = stream.alone;
  const Answer& together = stream.together;
  EXPECT_TRUE(together.in_order);
  if (together.num_finished == 1) {
    EXPECT_EQ(together.ids, alone.ids);
    EXPECT_EQ(together.text, alone.text);
    EXPECT_EQ(together.finished.reason(), alone.finished.reason());
    return;
  }
  ASSERT_GE(stream.cancel_after, 0) << together.result.message;
  EXPECT_EQ(together.result.code, 1);
  ASSERT_LE(together.ids.size(), alone.ids.size());
  EXPECT_TRUE(std::equal(together.ids.begin(), together.ids.end(), alone.ids.begin()))
      << "what came before the cancel differs";
}

TEST(ConcurrentStreamsTest, EveryAnswerIsThatOfTheRequestAlone) {
  EngineConfig engine;
  engine.max_sequences = 24;  // fewer places than streams: some wait
  engine.token_budget = 64;
  engine.num_blocks = 400;
  ModelServer server(engine, kRowMultiple);
  ASSERT_TRUE(server.ok());
  std::mt19937 random(6402);
  std::vector<Stream> streams = MakeStreams(server.model().config.vocab_size, &random);
  for (Stream& stream : streams) {
    stream.alone = RunOne(server.target(), stream.request, -1);
    ASSERT_TRUE(stream.alone.result.ok()) << stream.alone.result.message;
  }
  ASSERT_TRUE(Eventually([&] { return server.server().live_calls() == 0; }));
  const Exposition before = server.Scrape();
  EXPECT_EQ(before.Sum("flashquant_engine_rows_total", {{"kind", "real"}}), RowsOf(streams));

  std::vector<std::thread> threads;
  for (Stream& stream : streams) {
    threads.emplace_back(
        [&] { stream.together = RunOne(server.target(), stream.request, stream.cancel_after); });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < streams.size(); ++i) {
    SCOPED_TRACE("stream " + std::to_string(i));
    CheckTogether(streams[i]);
  }

  EXPECT_TRUE(Eventually([&] { return server.server().live_calls() == 0; }, 2s));
  EXPECT_TRUE(Eventually([&] { return server.engine().stats().kv_blocks_used == 0; }, 2s));
  EXPECT_EQ(server.engine().stats().kv_blocks_unaccounted, 0);
  const Exposition after = server.Scrape();
  EXPECT_EQ(after.Sum("flashquant_requests_received_total"), 2 * kNumStreams);
  EXPECT_EQ(Finished(after), 2 * kNumStreams);
  EXPECT_EQ(after.Sum("flashquant_generations_finished_total"), 2 * kNumStreams);
  EXPECT_EQ(after.Sum("flashquant_streams_open"), 0);
  EXPECT_EQ(after.Sum("flashquant_kv_blocks_unaccounted"), 0);
  EXPECT_EQ(after.Sum("flashquant_kv_blocks", {{"state", "used"}}), 0);
  EXPECT_EQ(after.Sum("flashquant_kv_blocks"), 399);
  // Decode steps are padded to the row multiple: real and padding rows are the rows launched.
  const double decode_rows = after.Sum("flashquant_engine_rows_total", {{"phase", "decode"}});
  EXPECT_GT(after.Sum("flashquant_engine_rows_total", {{"phase", "decode"}, {"kind", "padding"}}),
            0);
  EXPECT_EQ(static_cast<int64_t>(decode_rows) % kRowMultiple, 0);
  EXPECT_GT(after.Sum("flashquant_engine_rows_total", {{"kind", "real"}}), RowsOf(streams));
  // Batched: far fewer steps than one per token.
  EXPECT_LT(
      after.Sum("flashquant_engine_steps_total") - before.Sum("flashquant_engine_steps_total"),
      before.Sum("flashquant_engine_steps_total") / 4);
}

}  // namespace
}  // namespace flashquant
