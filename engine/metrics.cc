// Updates of the metrics; their names and buckets are in metrics_catalog.cc.
#include "engine/metrics.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"

namespace flashquant {
namespace {

template <typename Enum>
size_t Index(Enum value) {
  return static_cast<size_t>(value);
}

void Add(prometheus::Counter* counter, double value) {
  if (std::isfinite(value) && value > 0) counter->Increment(value);
}

void Add(prometheus::Counter* counter, int64_t value) { Add(counter, static_cast<double>(value)); }

void Observe(prometheus::Histogram* histogram, double value) {
  if (std::isfinite(value)) histogram->Observe(value);
}

void Observe(prometheus::Histogram* histogram, Duration duration) {
  Observe(histogram, std::max(0.0, ToSeconds(duration)));
}

void Set(prometheus::Gauge* gauge, double value) {
  if (std::isfinite(value)) gauge->Set(value);
}

void Set(prometheus::Gauge* gauge, int64_t value) { Set(gauge, static_cast<double>(value)); }

double UnixSeconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

void Metrics::RequestReceived(RpcMethod method) { requests_received_[Index(method)]->Increment(); }

void Metrics::RequestFinished(RpcMethod method, absl::StatusCode code) {
  const size_t index = std::min(Index(code), static_cast<size_t>(kNumCodes - 1));
  requests_finished_[Index(method)][index]->Increment();
}

void Metrics::RequestRejected(RejectReason reason) {
  requests_rejected_[Index(reason)]->Increment();
}

void Metrics::ObserveRequestDuration(Duration duration) { Observe(request_duration_, duration); }

void Metrics::ObserveTokenizeDuration(Duration duration) { Observe(tokenize_duration_, duration); }

void Metrics::ObserveTiming(const RequestTiming& timing, int64_t output_tokens) {
  Observe(queue_duration_, timing.queue);
  if (output_tokens < 1) return;
  Observe(prefill_duration_, timing.prefill);
  Observe(decode_duration_, timing.decode);
}

void Metrics::ObserveTimeToFirstToken(Duration duration) {
  Observe(time_to_first_token_, duration);
}

void Metrics::ObserveInterTokenLatency(Duration duration) {
  Observe(inter_token_latency_, duration);
}

void Metrics::ObserveTimePerOutputToken(Duration total, Duration first_token,
                                        int64_t output_tokens) {
  if (output_tokens < 2) return;
  Observe(time_per_output_token_,
          std::max(0.0, ToSeconds(total - first_token)) / static_cast<double>(output_tokens - 1));
}

void Metrics::ObserveRequestTokens(int64_t input, int64_t output, int64_t max_output) {
  Observe(request_input_tokens_, static_cast<double>(input));
  Observe(request_output_tokens_, static_cast<double>(output));
  Observe(request_max_output_tokens_, static_cast<double>(max_output));
}

void Metrics::GenerationFinished(GenerationEnd end) {
  generations_finished_[Index(end)]->Increment();
}

void Metrics::ObserveCancelToRelease(Duration duration) { Observe(cancel_to_release_, duration); }

void Metrics::AddInputTokens(InputTokens kind, int64_t count) {
  Add(input_tokens_[Index(kind)], count);
}

void Metrics::AddOutputTokens(int64_t count) { Add(output_tokens_, count); }

void Metrics::AddDiscardedTokens(DiscardReason reason, int64_t count) {
  Add(output_tokens_discarded_[Index(reason)], count);
}

void Metrics::SetRequests(int64_t waiting, int64_t running, int64_t preempted, int64_t paused) {
  Set(requests_waiting_, waiting);
  Set(requests_running_, running);
  Set(requests_preempted_, preempted);
  Set(requests_paused_, paused);
}

void Metrics::SetQueueLimit(int64_t limit) { Set(queue_limit_, limit); }

void Metrics::SetOldestWaiting(std::optional<Duration> age) {
  Set(oldest_waiting_, age.has_value() ? UnixSeconds() - ToSeconds(*age) : 0.0);
}

void Metrics::AddPreemptions(PreemptionCause cause, int64_t count) {
  Add(preemptions_[Index(cause)], count);
}

void Metrics::StepFinished(StepPhase phase, int64_t real_rows, int64_t launched_rows,
                           Duration duration) {
  const size_t index = Index(phase);
  engine_steps_[index]->Increment();
  Observe(step_duration_[index], duration);
  Observe(step_rows_[index], static_cast<double>(real_rows));
  Add(rows_real_[index], real_rows);
  Add(rows_padding_[index], launched_rows - real_rows);
  Set(last_step_, UnixSeconds());
}

void Metrics::AddDeviceTime(StepPhase phase, DeviceStage stage, Duration duration) {
  Add(device_seconds_[Index(phase)][Index(stage)], ToSeconds(duration));
}

void Metrics::AddStageTime(StepPhase phase, StepStage stage, Duration duration) {
  Add(stage_seconds_[Index(phase)][Index(stage)], ToSeconds(duration));
}

void Metrics::SetRowMultiple(int64_t row_multiple) {
  for (prometheus::Gauge* gauge : row_multiple_) Set(gauge, row_multiple);
}

void Metrics::AddNonFiniteRows(int64_t count) { Add(non_finite_rows_, count); }

void Metrics::SetKvPool(int64_t block_tokens) { Set(kv_block_tokens_, block_tokens); }

void Metrics::SetKvBytes(int64_t bytes) { Set(kv_bytes_, bytes); }

void Metrics::SetKvBlocks(int64_t used, int64_t cached, int64_t free, int64_t unaccounted) {
  Set(kv_blocks_[0], used);
  Set(kv_blocks_[1], cached);
  Set(kv_blocks_[2], free);
  const int64_t pool = used + cached + free;
  Set(kv_usage_ratio_, pool > 0 ? static_cast<double>(used) / static_cast<double>(pool) : 0.0);
  Set(kv_blocks_unaccounted_, unaccounted);
}

void Metrics::AddKvAllocationFailures(int64_t count) { Add(kv_allocation_failures_, count); }

void Metrics::AddPrefixCacheLookup(int64_t hit_tokens, int64_t miss_tokens) {
  Add(prefix_cache_lookup_[0], hit_tokens);
  Add(prefix_cache_lookup_[1], miss_tokens);
}

void Metrics::StreamOpened() { streams_open_->Increment(); }

void Metrics::StreamClosed() { streams_open_->Decrement(); }

void Metrics::AddPendingMessages(int64_t delta) {
  stream_pending_messages_->Increment(static_cast<double>(delta));
}

void Metrics::StreamAborted(StreamAbort reason) { stream_aborts_[Index(reason)]->Increment(); }

void Metrics::AuthFailed(AuthFailure reason) { auth_failures_[Index(reason)]->Increment(); }

void Metrics::ObserveStreamStall(Duration duration) { Observe(stream_stall_, duration); }

void Metrics::ObserveCallbackDelay(Duration delay) { Observe(callback_delay_, delay); }

void Metrics::SetModelLoadDuration(LoadStage stage, double seconds) {
  Set(model_load_duration_[Index(stage)], seconds);
}

void Metrics::SetModelWeightBytes(WeightKind kind, int64_t bytes) {
  Set(model_weight_bytes_[Index(kind)], bytes);
}

void Metrics::SetModelReady(bool ready) { Set(model_ready_, ready ? 1.0 : 0.0); }

void Metrics::SetModelContextLimit(int64_t tokens) { Set(model_context_limit_, tokens); }

void Metrics::LogMessage(LogLevel level) { log_messages_[Index(level)]->Increment(); }

}  // namespace flashquant
