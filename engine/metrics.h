// Metrics: every metric of the program in one class, over a prometheus::Registry that is handed in.
//
// Each family is made in the constructor, and so is each series but those of model_info and
// build_info, whose labels are known only when the model is loaded; an update afterwards is an
// atomic or a short lock inside prometheus-cpp. A value that is not finite is dropped: one NaN
// would spoil a histogram's sum for ever. No label has values that a client can choose. Names,
// buckets and meanings: README.md, "Metrics". The process_* values are process_collector.h's.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/base/clock.h"
#include "engine/request.h"
#include "engine/scheduler/step_plan.h"

namespace prometheus {
class Counter;
template <typename T>
class Family;
class Gauge;
class Histogram;
class Registry;
}  // namespace prometheus

namespace flashquant {

enum class RpcMethod { kGenerate, kGenerateText, kTokenize, kDetokenize, kGetModel, kOther };
enum class RejectReason {
  kInvalid,
  kTooLong,
  kKvCapacity,
  kQueueFull,
  kQueueTimeout,
  kUnauthenticated,
  kQuota,
  kDraining,
  kNotReady
};
// The first five are those of FinishReason, in its order.
enum class GenerationEnd {
  kEos,
  kStopSequence,
  kStopToken,
  kLength,
  kContextLength,
  kCancelled,
  kDeadline,
  kSlowReader,
  kDrained,
  kError
};
enum class InputTokens { kComputed, kCached, kRecomputed };
enum class PreemptionCause { kKvPressure, kPriority };
enum class DiscardReason { kCancelled, kPastStop, kDeadline };
enum class StepStage { kSchedule, kUpload, kForward, kSample, kDownload, kDeliver };
// What the device of a pass does, by its own clock.
enum class DeviceStage { kLayers, kHead, kSampling };
enum class StreamAbort { kClientCancel, kDisconnect, kDeadline, kSlowReader, kDrain };
enum class AuthFailure { kMissing, kMalformed, kUnknown, kExpired };
// The last is the whole: from the folder's opening to the end of the warm-up.
enum class LoadStage { kRead, kVerify, kPack, kUpload, kWarmUp, kTotal };
enum class WeightKind { kPacked, kScales, kOutliers, kDense };
enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError, kCritical };

// Updates are safe from any thread.
class Metrics final {
 public:
  // `model`: value of that label, escaped by the exposition. `context_length`: bound of the
  // tokens-per-request buckets. The registry outlives the object.
  Metrics(prometheus::Registry& registry, const std::string& model, int32_t context_length);
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Traffic: called by the server, every RPC once each.
  void RequestReceived(RpcMethod method);
  void RequestFinished(RpcMethod method, absl::StatusCode code);
  // Refused before the first token, by the server or (its Submit errors, its QUEUE_TIMEOUT) by the
  // engine; the server counts both.
  void RequestRejected(RejectReason reason);
  void ObserveRequestDuration(Duration duration);  // status OK only
  void ObserveTokenizeDuration(Duration duration);

  // Latencies and sizes of one request: called by the delivery side.
  void ObserveTiming(const RequestTiming& timing, int64_t output_tokens);  // queue, prefill, decode
  void ObserveTimeToFirstToken(Duration duration);  // arrival to first token handed over
  void ObserveInterTokenLatency(Duration duration);
  void ObserveTimePerOutputToken(Duration total, Duration first_token, int64_t output_tokens);
  void ObserveRequestTokens(int64_t input, int64_t output, int64_t max_output);

  // Generation: called by the engine.
  void GenerationFinished(GenerationEnd end);
  void ObserveCancelToRelease(Duration duration);
  void AddInputTokens(InputTokens kind, int64_t count);
  void AddOutputTokens(int64_t count);
  void AddDiscardedTokens(DiscardReason reason, int64_t count);

  // Scheduler and batch: called by the engine.
  void SetRequests(int64_t waiting, int64_t running, int64_t preempted, int64_t paused);
  void SetQueueLimit(int64_t limit);
  // Age of the oldest waiting request; nullopt = none.
  void SetOldestWaiting(std::optional<Duration> age);
  void AddPreemptions(PreemptionCause cause, int64_t count);
  // One pass that has been collected.
  void StepFinished(StepPhase phase, int64_t real_rows, int64_t launched_rows, Duration duration);
  void AddStageTime(StepPhase phase, StepStage stage, Duration duration);
  void AddDeviceTime(StepPhase phase, DeviceStage stage, Duration duration);
  void SetRowMultiple(int64_t row_multiple);
  void AddNonFiniteRows(int64_t count);

  // KV cache: called by the engine; SetKvBytes by whoever made the pool.
  void SetKvPool(int64_t block_tokens);
  void SetKvBytes(int64_t bytes);
  void SetKvBlocks(int64_t used, int64_t cached, int64_t free, int64_t unaccounted);
  void AddKvAllocationFailures(int64_t count);
  // Of the tokens of sequences that were admitted: found, and not found.
  void AddPrefixCacheLookup(int64_t hit_tokens, int64_t miss_tokens);

  // Streams and transport: called by the server.
  void StreamOpened();
  void StreamClosed();
  void AddPendingMessages(int64_t delta);
  void StreamAborted(StreamAbort reason);
  void AuthFailed(AuthFailure reason);
  void ObserveStreamStall(Duration duration);
  void ObserveCallbackDelay(Duration delay);

  // Model, build, log: called at start.
  void SetModelLoadDuration(LoadStage stage, double seconds);
  void SetModelWeightBytes(WeightKind kind, int64_t bytes);
  void SetModelReady(bool ready);
  // Once each: a second call with other values adds a second series.
  void SetModelInfo(const std::string& quantization, const std::string& group_size,
                    const std::string& outlier_density, const std::string& revision);
  void SetModelContextLimit(int64_t tokens);
  void SetBuildInfo(const std::string& version, const std::string& revision,
                    const std::string& backend, const std::string& cuda, const std::string& grpc);
  void LogMessage(LogLevel level);

 private:
  class Builder;
  static constexpr int kNumMethods = 6;
  static constexpr int kNumCodes = 17;
  static constexpr int kNumPhases = 2;
  static constexpr int kNumStages = 6;
  template <int n>
  using Counters = std::array<prometheus::Counter*, n>;
  template <int n>
  using Gauges = std::array<prometheus::Gauge*, n>;

  void BuildTraffic(const Builder& builder, int32_t context_length);
  void BuildTokens(const Builder& builder);
  void BuildScheduler(const Builder& builder);
  void BuildKv(const Builder& builder);
  void BuildStreams(const Builder& builder, const Builder& global);
  void BuildModel(const Builder& builder, const Builder& global);

  const std::string model_;

  Counters<kNumMethods> requests_received_{};
  std::array<Counters<kNumCodes>, kNumMethods> requests_finished_{};
  Counters<9> requests_rejected_{};
  Counters<10> generations_finished_{};
  prometheus::Histogram* request_duration_ = nullptr;
  prometheus::Histogram* queue_duration_ = nullptr;
  prometheus::Histogram* prefill_duration_ = nullptr;
  prometheus::Histogram* decode_duration_ = nullptr;
  prometheus::Histogram* tokenize_duration_ = nullptr;
  prometheus::Histogram* time_to_first_token_ = nullptr;
  prometheus::Histogram* inter_token_latency_ = nullptr;
  prometheus::Histogram* time_per_output_token_ = nullptr;
  prometheus::Histogram* request_input_tokens_ = nullptr;
  prometheus::Histogram* request_output_tokens_ = nullptr;
  prometheus::Histogram* request_max_output_tokens_ = nullptr;
  prometheus::Histogram* cancel_to_release_ = nullptr;

  Counters<3> input_tokens_{};
  prometheus::Counter* output_tokens_ = nullptr;
  Counters<3> output_tokens_discarded_{};

  prometheus::Gauge* requests_waiting_ = nullptr;
  prometheus::Gauge* requests_running_ = nullptr;
  prometheus::Gauge* requests_preempted_ = nullptr;
  prometheus::Gauge* requests_paused_ = nullptr;
  prometheus::Gauge* queue_limit_ = nullptr;
  prometheus::Gauge* oldest_waiting_ = nullptr;
  Counters<2> preemptions_{};
  Counters<kNumPhases> engine_steps_{};
  std::array<prometheus::Histogram*, kNumPhases> step_duration_{};
  std::array<prometheus::Histogram*, kNumPhases> step_rows_{};
  std::array<Counters<kNumStages>, kNumPhases> stage_seconds_{};
  std::array<Counters<3>, kNumPhases> device_seconds_{};
  Counters<kNumPhases> rows_real_{};
  Counters<kNumPhases> rows_padding_{};
  Gauges<kNumPhases> row_multiple_{};
  prometheus::Gauge* last_step_ = nullptr;
  prometheus::Counter* non_finite_rows_ = nullptr;

  Gauges<3> kv_blocks_{};  // used, cached, free
  prometheus::Gauge* kv_usage_ratio_ = nullptr;
  prometheus::Gauge* kv_block_tokens_ = nullptr;
  prometheus::Gauge* kv_bytes_ = nullptr;
  prometheus::Counter* kv_allocation_failures_ = nullptr;
  prometheus::Gauge* kv_blocks_unaccounted_ = nullptr;
  Counters<2> prefix_cache_lookup_{};  // hit, miss

  prometheus::Gauge* streams_open_ = nullptr;
  prometheus::Gauge* stream_pending_messages_ = nullptr;
  Counters<5> stream_aborts_{};
  Counters<4> auth_failures_{};
  prometheus::Histogram* stream_stall_ = nullptr;
  prometheus::Histogram* callback_delay_ = nullptr;

  Gauges<6> model_load_duration_{};
  Gauges<4> model_weight_bytes_{};
  prometheus::Gauge* model_ready_ = nullptr;
  prometheus::Gauge* model_context_limit_ = nullptr;
  prometheus::Family<prometheus::Gauge>* model_info_ = nullptr;
  prometheus::Family<prometheus::Gauge>* build_info_ = nullptr;
  Counters<6> log_messages_{};
};

}  // namespace flashquant
