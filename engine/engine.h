// Engine: takes requests from any thread and runs them, batched, on one thread that it owns.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/engine_config.h"
#include "engine/request.h"
#include "engine/request_stream.h"

namespace flashquant {

class Metrics;
class StepRunner;
class Tokenizer;

enum class EngineHealth { kServing, kDraining, kFailed };

struct EngineStats {
  int64_t requests_waiting = 0;
  int64_t requests_running = 0;
  int64_t requests_preempted = 0;
  int64_t requests_paused = 0;
  int64_t kv_blocks_total = 0;  // usable ones, null block excluded
  int64_t kv_blocks_used = 0;
  int64_t kv_blocks_cached = 0;       // kept by the prefix cache alone
  int64_t kv_blocks_unaccounted = 0;  // anything but 0 is a bug
  int64_t steps = 0;
};

// Whether the engine thread gets on: a step that is under way while `turns` stays the same is
// stuck.
struct EngineProgress {
  bool in_step = false;
  int64_t turns = 0;
};

// What the engine works with; all must outlive it. Only `runner` must be set.
struct EngineDependencies {
  StepRunner* runner = nullptr;
  const Tokenizer* tokenizer = nullptr;  // null: token ids only, no stop strings
  Metrics* metrics = nullptr;            // null: not exported
  const Clock* clock = nullptr;          // null: the real one
  StreamListener* listener = nullptr;    // null: streams are read with WaitAndTake
  std::vector<int32_t> eos_token_ids;    // tokens that end an answer (generation_config.json)
  int32_t vocab_size = 0;                // checks prompt ids in Submit; 0 = not checked
  // Called once, on the engine thread, with the error that ended the engine. Must not call the
  // engine.
  std::function<void(const absl::Status&)> on_failure;
};

class Engine final {
 public:
  // Starts the engine thread. FAILED_PRECONDITION for a configuration that Validate refuses.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineConfig& config,
                                                        const EngineDependencies& dependencies);
  // Stops at the next step boundary; what still runs ends with UNAVAILABLE.
  ~Engine();

  // Takes the request and guarantees exactly one terminal event on the returned stream, or returns
  // an error and takes nothing: INVALID_ARGUMENT (empty, id out of range, could never fit, even
  // alone), RESOURCE_EXHAUSTED
  // (queue full), UNAVAILABLE (draining, failed), ALREADY_EXISTS (id running), DEADLINE_EXCEEDED
  // (already past). The error's ErrorInfo reason is its payload kErrorReasonPayload. Any thread;
  // never waits.
  absl::StatusOr<std::shared_ptr<RequestStream>> Submit(GenerateRequest request,
                                                        std::shared_ptr<void> user_data = nullptr);
  // Makes the engine look at cancels and deadlines now although nothing runs. RequestStream::Cancel
  // does it by itself; tests need it after moving a fake clock. Any thread.
  void NotifyCancelled();

  // Forgets what the prefix cache keeps, at the next step boundary. Any thread; does not wait.
  void ResetPrefixCache();

  // Refuses new requests and waits until the accepted ones ended or `deadline` passed; what is left
  // then ends with UNAVAILABLE. Returns whether all had ended by themselves. Not the engine thread.
  bool Drain(TimePoint deadline);

  EngineHealth health() const;
  // What made the engine fail; OK while it has not. Any thread.
  absl::Status failure() const;
  // Snapshot of the last step boundary. Any thread.
  EngineStats stats() const;
  // Any thread; does not wait for the engine.
  EngineProgress progress() const;

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashquant
