// Names, help texts, labels and buckets of all metrics: the constructor of Metrics. What they mean
// in detail and which queries use them: README.md, "Metrics".
#include <utility>

#include "engine/metrics.h"
#include "fmt/format.h"
#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

namespace flashquant {
namespace {

using Bounds = prometheus::Histogram::BucketBoundaries;

Bounds FirstTokenBounds() {
  return {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
          0.75,  1,     2.5,  5,    7.5,  10,   20,   40,  80};
}

Bounds TokenGapBounds() {
  return {0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035,
          0.05,  0.075,  0.1,   0.15,   0.2,  0.3,   0.5,  1,     2.5};
}

Bounds RequestBounds() {
  return {0.01, 0.02, 0.04,  0.08,  0.16,  0.32,  0.64,   1.28,
          2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68};
}

Bounds StepBounds() {
  return {0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015,
          0.02,   0.03,  0.05,  0.1,   0.25,  0.5,    1,    2.5};
}

Bounds RowBounds() { return {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128}; }

Bounds ShortWaitBounds() { return {0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30}; }

// 1, 2, 5, 10, 20, 50 ... up to the model's context.
Bounds TokenCountBounds(int32_t context_length) {
  Bounds bounds;
  for (double decade = 1; decade < 1e9; decade *= 10) {
    for (double digit : {1.0, 2.0, 5.0}) {
      if (!bounds.empty() && digit * decade > context_length) return bounds;
      bounds.push_back(digit * decade);
    }
  }
  return bounds;
}

constexpr const char* kMethodNames[] = {"Generate",   "GenerateText", "Tokenize",
                                        "Detokenize", "GetModel",     "other"};
constexpr const char* kCodeNames[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
constexpr const char* kPhaseNames[] = {"prefill", "decode"};
constexpr const char* kStageNames[] = {"schedule", "upload",   "forward",
                                       "sample",   "download", "deliver"};

}  // namespace

// Makes series in one registry with the model label.
class Metrics::Builder {
 public:
  Builder(prometheus::Registry& registry, const std::string& model)
      : registry_(registry), model_(model) {}

  using Labels = prometheus::Labels;

  prometheus::Counter* Counter(const char* name, const char* help, Labels labels = {}) const {
    return &prometheus::BuildCounter()
                .Name(fmt::format("flashquant_{}", name))
                .Help(help)
                .Register(registry_)
                .Add(WithModel(std::move(labels)));
  }
  prometheus::Gauge* Gauge(const char* name, const char* help, Labels labels = {}) const {
    return &prometheus::BuildGauge()
                .Name(fmt::format("flashquant_{}", name))
                .Help(help)
                .Register(registry_)
                .Add(WithModel(std::move(labels)));
  }
  prometheus::Histogram* Histogram(const char* name, const char* help, const Bounds& bounds,
                                   Labels labels = {}) const {
    return &prometheus::BuildHistogram()
                .Name(fmt::format("flashquant_{}", name))
                .Help(help)
                .Register(registry_)
                .Add(WithModel(std::move(labels)), bounds);
  }
  // A family without series so far.
  prometheus::Family<prometheus::Gauge>* GaugeFamily(const char* name, const char* help) const {
    return &prometheus::BuildGauge()
                .Name(fmt::format("flashquant_{}", name))
                .Help(help)
                .Register(registry_);
  }
  // One series per value of `label`.
  template <size_t n>
  void Split(std::array<prometheus::Counter*, n>* series, const char* name, const char* help,
             const char* label, const std::array<const char*, n>& values) const {
    for (size_t i = 0; i < n; ++i) (*series)[i] = Counter(name, help, {{label, values[i]}});
  }
  template <size_t n>
  void Split(std::array<prometheus::Gauge*, n>* series, const char* name, const char* help,
             const char* label, const std::array<const char*, n>& values) const {
    for (size_t i = 0; i < n; ++i) (*series)[i] = Gauge(name, help, {{label, values[i]}});
  }

 private:
  Labels WithModel(Labels labels) const {
    if (!model_.empty()) labels.emplace("model", model_);
    return labels;
  }

  prometheus::Registry& registry_;
  const std::string model_;
};

Metrics::Metrics(prometheus::Registry& registry, const std::string& model, int32_t context_length)
    : model_(model) {
  const Builder builder(registry, model);
  BuildTraffic(builder, context_length);
  BuildTokens(builder);
  BuildScheduler(builder);
  BuildKv(builder);
  const Builder global(registry, "");
  BuildStreams(builder, global);
  BuildModel(builder, global);
}

void Metrics::BuildTraffic(const Builder& builder, int32_t context_length) {
  for (size_t method = 0; method < kNumMethods; ++method) {
    const char* name = kMethodNames[method];
    requests_received_[method] = builder.Counter(
        "requests_received_total", "RPCs that reached our handler", {{"method", name}});
    for (size_t code = 0; code < kNumCodes; ++code) {
      requests_finished_[method][code] =
          builder.Counter("requests_finished_total", "RPCs by final status, each once",
                          {{"method", name}, {"code", kCodeNames[code]}});
    }
  }
  builder.Split<9>(&requests_rejected_, "requests_rejected_total", "Refused before the first token",
                   "reason",
                   {"invalid", "too_long", "kv_capacity", "queue_full", "queue_timeout",
                    "unauthenticated", "quota", "draining", "not_ready"});
  builder.Split<10>(&generations_finished_, "generations_finished_total", "Why generation ended",
                    "reason",
                    {"eos", "stop_sequence", "stop_token", "length", "context_length", "cancelled",
                     "deadline", "slow_reader", "drained", "error"});

  request_duration_ =
      builder.Histogram("request_duration_seconds",
                        "Arrival to last message handed over, status OK only", RequestBounds());
  queue_duration_ = builder.Histogram("request_queue_duration_seconds",
                                      "Arrival to first scheduling", RequestBounds());
  prefill_duration_ = builder.Histogram("request_prefill_duration_seconds",
                                        "First scheduling to first token", RequestBounds());
  decode_duration_ =
      builder.Histogram("request_decode_duration_seconds", "First to last token", RequestBounds());
  tokenize_duration_ = builder.Histogram("request_tokenize_duration_seconds", "Text to token ids",
                                         ShortWaitBounds());
  time_to_first_token_ = builder.Histogram(
      "time_to_first_token_seconds", "Arrival to first token handed over", FirstTokenBounds());
  inter_token_latency_ =
      builder.Histogram("inter_token_latency_seconds",
                        "Gaps between consecutive tokens of a request", TokenGapBounds());
  time_per_output_token_ = builder.Histogram("time_per_output_token_seconds",
                                             "Mean gap of one request's tokens", TokenGapBounds());
  const Bounds token_bounds = TokenCountBounds(context_length);
  request_input_tokens_ =
      builder.Histogram("request_input_tokens", "Prompt tokens of a request", token_bounds);
  request_output_tokens_ =
      builder.Histogram("request_output_tokens", "Output tokens of a request", token_bounds);
  request_max_output_tokens_ = builder.Histogram(
      "request_max_output_tokens", "Output tokens that a request allowed", token_bounds);
  cancel_to_release_ = builder.Histogram(
      "cancel_to_release_seconds", "Cancel seen to KV blocks back in the pool", ShortWaitBounds());
}

void Metrics::BuildTokens(const Builder& builder) {
  builder.Split<3>(&input_tokens_, "input_tokens_total",
                   "Prompt tokens; recomputed is the price of preemption", "kind",
                   {"computed", "cached", "recomputed"});
  output_tokens_ = builder.Counter("output_tokens_total", "Tokens accepted into an answer");
  builder.Split<3>(&output_tokens_discarded_, "output_tokens_discarded_total",
                   "Tokens computed but never delivered", "reason",
                   {"cancelled", "past_stop", "deadline"});
}

void Metrics::BuildScheduler(const Builder& builder) {
  requests_waiting_ = builder.Gauge("requests_waiting", "Admitted, not yet scheduled");
  requests_running_ = builder.Gauge("requests_running", "In the running set");
  requests_preempted_ = builder.Gauge("requests_preempted", "Evicted and waiting to resume");
  requests_paused_ = builder.Gauge("requests_paused", "Paused because the client does not read");
  queue_limit_ = builder.Gauge("queue_limit", "Most requests that may wait");
  oldest_waiting_ = builder.Gauge("oldest_waiting_timestamp_seconds",
                                  "Arrival of the oldest waiting request, 0 if none");
  builder.Split<2>(&preemptions_, "preemptions_total", "Sequences that lost their KV blocks",
                   "cause", {"kv_pressure", "priority"});
  for (size_t phase = 0; phase < kNumPhases; ++phase) {
    const Builder::Labels label = {{"phase", kPhaseNames[phase]}};
    engine_steps_[phase] = builder.Counter("engine_steps_total", "Forward passes", label);
    step_duration_[phase] = builder.Histogram("engine_step_duration_seconds",
                                              "Wall time of one pass", StepBounds(), label);
    step_rows_[phase] =
        builder.Histogram("engine_step_rows", "Real rows in a pass", RowBounds(), label);
    row_multiple_[phase] =
        builder.Gauge("engine_row_multiple", "Rows are rounded up to this", label);
    for (size_t stage = 0; stage < kNumStages; ++stage) {
      stage_seconds_[phase][stage] = builder.Counter(
          "engine_step_stage_seconds_total", "Where the host's time of the passes goes",
          {{"phase", kPhaseNames[phase]}, {"stage", kStageNames[stage]}});
    }
    constexpr std::array<const char*, 3> kDeviceStages = {"layers", "head", "sampling"};
    for (size_t stage = 0; stage < kDeviceStages.size(); ++stage) {
      device_seconds_[phase][stage] = builder.Counter(
          "engine_device_seconds_total", "What the passes take by the device's own clock",
          {{"phase", kPhaseNames[phase]}, {"stage", kDeviceStages[stage]}});
    }
    const char* const rows_help = "Rows launched; padding over the sum is the waste";
    rows_real_[phase] = builder.Counter("engine_rows_total", rows_help,
                                        {{"phase", kPhaseNames[phase]}, {"kind", "real"}});
    rows_padding_[phase] = builder.Counter("engine_rows_total", rows_help,
                                           {{"phase", kPhaseNames[phase]}, {"kind", "padding"}});
  }
  last_step_ =
      builder.Gauge("engine_last_step_timestamp_seconds", "When the last pass was collected");
  non_finite_rows_ =
      builder.Counter("nonfinite_logit_rows_total", "Rows whose logits had NaN or infinity");
}

void Metrics::BuildKv(const Builder& builder) {
  builder.Split<3>(&kv_blocks_, "kv_blocks", "KV blocks by state; they sum to the pool", "state",
                   {"used", "cached", "free"});
  kv_usage_ratio_ = builder.Gauge("kv_usage_ratio", "Used share of the KV pool, 0 to 1");
  kv_block_tokens_ = builder.Gauge("kv_block_tokens", "Tokens per KV block");
  kv_bytes_ = builder.Gauge("kv_bytes", "Size of the KV pool");
  kv_allocation_failures_ =
      builder.Counter("kv_allocation_failures_total", "KV blocks asked for and not given");
  kv_blocks_unaccounted_ =
      builder.Gauge("kv_blocks_unaccounted", "Pool minus owned, cached and free; not 0 is a bug");
  builder.Split<2>(&prefix_cache_lookup_, "prefix_cache_lookup_tokens_total",
                   "Tokens of sequences that were admitted, by whether the prefix cache had them",
                   "result", {"hit", "miss"});
}

void Metrics::BuildStreams(const Builder& builder, const Builder& global) {
  streams_open_ = builder.Gauge("streams_open", "Generate calls in progress");
  stream_pending_messages_ =
      builder.Gauge("stream_pending_messages", "Written by the engine, not yet accepted by gRPC");
  builder.Split<5>(&stream_aborts_, "stream_aborts_total", "Streams that ended early", "reason",
                   {"client_cancel", "disconnect", "deadline", "slow_reader", "drain"});
  global.Split<4>(&auth_failures_, "auth_failures_total", "Calls without valid credentials",
                  "reason", {"missing", "malformed", "unknown", "expired"});
  stream_stall_ =
      builder.Histogram("stream_stall_seconds", "One write, start to done", ShortWaitBounds());
}

void Metrics::BuildModel(const Builder& builder, const Builder& global) {
  builder.Split<6>(&model_load_duration_, "model_load_duration_seconds",
                   "Time to load the model; readers work side by side, beside pack and upload",
                   "stage", {"read", "verify", "pack", "upload", "warmup", "total"});
  builder.Split<4>(&model_weight_bytes_, "model_weight_bytes",
                   "Bytes of the checkpoint's tensors by what they hold", "kind",
                   {"packed", "scales", "outliers", "dense"});
  model_ready_ = builder.Gauge("model_ready", "1 when the model can serve");
  model_context_limit_ =
      builder.Gauge("model_context_limit_tokens", "Tokens that a sequence may have");
  model_info_ = builder.GaugeFamily("model_info", "Facts of the model as labels");
  build_info_ = global.GaugeFamily("build_info", "Facts of the program as labels");
  global.Split<6>(&log_messages_, "log_messages_total", "Log lines by level", "level",
                  {"trace", "debug", "info", "warning", "error", "critical"});
  callback_delay_ =
      global.Histogram("grpc_callback_delay_seconds",
                       "How late a task of gRPC's callback threads runs", ShortWaitBounds());
}

void Metrics::SetModelInfo(const std::string& quantization, const std::string& group_size,
                           const std::string& outlier_density, const std::string& revision) {
  Builder::Labels labels = {{"quantization", quantization},
                            {"group_size", group_size},
                            {"outlier_density", outlier_density},
                            {"revision", revision}};
  if (!model_.empty()) labels.emplace("model", model_);
  model_info_->Add(labels).Set(1);
}

void Metrics::SetBuildInfo(const std::string& version, const std::string& revision,
                           const std::string& backend, const std::string& cuda,
                           const std::string& grpc) {
  build_info_
      ->Add({{"version", version},
             {"revision", revision},
             {"backend", backend},
             {"cuda", cuda},
             {"grpc", grpc}})
      .Set(1);
}

}  // namespace flashquant
