// TestServer: a whole server in this process on a free port, with a pretended model (FakeModel
// behind FakeStepRunner): its answers are known, fast and steerable (gate, faults).
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/metrics.h"
#include "engine/tokenizer/tokenizer.h"
#include "kernels/base/mutex.h"
#include "prometheus/registry.h"
#include "server/inference_client.h"
#include "server/inference_server.h"
#include "tests/e2e/exposition.h"
#include "tests/support/fake_step_runner.h"

namespace flashquant {

// Ids 0..255 are the bytes; a greater id is its number, "[300]", `repeat` times. 999 is special.
class NumberTokenizer final : public Tokenizer {
 public:
  explicit NumberTokenizer(int repeat = 1);
  std::vector<int32_t> Encode(std::string_view text, SpecialText special) const override;
  std::string_view TokenBytes(int32_t id) const override { return bytes_[static_cast<size_t>(id)]; }
  bool IsSpecial(int32_t id) const override { return id == vocab_size() - 1; }
  std::optional<int32_t> TokenId(std::string_view) const override { return std::nullopt; }
  int32_t vocab_size() const override { return static_cast<int32_t>(bytes_.size()); }
  std::optional<int32_t> prompt_bos() const override { return std::nullopt; }
  std::optional<int32_t> bos() const override { return std::nullopt; }
  std::optional<int32_t> eos() const override { return std::nullopt; }

 private:
  std::vector<std::string> bytes_;
};

struct TestServerOptions {
  EngineConfig engine = {.context_length = 2048,
                         .max_sequences = 8,
                         .token_budget = 64,
                         .max_waiting = 16,
                         .block_tokens = 16,
                         .num_blocks = 1025};
  InferenceServerOptions server = {.model_name = "fake"};
  Duration max_request_duration = std::chrono::seconds(60);
  int text_repeat = 1;         // of NumberTokenizer
  ClientSecurity client = {};  // of Generate and GenerateAsync
  bool serve = true;           // else it stays loading until Serve()
};

// What a stream brought.
struct Answer {
  CallResult result;
  int num_accepted = 0;
  int num_finished = 0;
  int num_deltas = 0;
  bool in_order = true;  // Accepted first, Finished last, first_index right
  v1::Accepted accepted;
  v1::Finished finished;
  std::string text;
  std::vector<int32_t> ids;
  void Add(const v1::GenerateResponse& response);
};

class TestServer final {
 public:
  explicit TestServer(TestServerOptions options = {});
  ~TestServer();

  void Serve();
  std::string target() const;
  InferenceServer& server() { return *server_; }
  Engine& engine() { return *engine_; }
  FakeStepRunner& runner() { return runner_; }
  const FakeModel& model() const { return model_; }
  const NumberTokenizer& tokenizer() const { return tokenizer_; }
  bool engine_failed() const { return engine_failed_.load(); }

  // The request's answer, by one call on a connection of its own.
  Answer Generate(const v1::GenerateRequest& request, const CallOptions& options = {});
  std::future<Answer> GenerateAsync(const v1::GenerateRequest& request,
                                    const CallOptions& options = {});

  Exposition Scrape();
  // What the metrics are in.
  std::shared_ptr<prometheus::Registry> registry() { return registry_; }
  // The leak check: within two seconds nothing is open, waiting, running or holding KV blocks, and
  // every call that was received has finished. Empty when it holds, else what does not.
  std::string LeakCheck();

 private:
  const TestServerOptions options_;
  const FakeModel model_;
  const NumberTokenizer tokenizer_;
  const SteadyClock clock_;
  FakeStepRunner runner_;
  const std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  Metrics metrics_;
  std::atomic<bool> engine_failed_{false};
  std::unique_ptr<InferenceServer> server_;
  std::unique_ptr<Engine> engine_;
};

// "text" with these limits, greedy by the fake model's rules, token ids and text asked for.
v1::GenerateRequest TextRequest(const std::string& text, uint32_t max_output_tokens,
                                uint64_t seed = 1);

// Waits until `condition` holds, at most `limit`; whether it does.
bool Eventually(const std::function<bool()>& condition, Duration limit = std::chrono::seconds(10));

}  // namespace flashquant
