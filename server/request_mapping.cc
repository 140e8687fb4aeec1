// Field by field; all sums in 64 bits, because clients send 2^32 - 1.
#include "server/request_mapping.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "fmt/format.h"

namespace flashquant {
namespace {

RequestError OneViolation(const char* why, std::string field, std::string description,
                          int64_t limit, int64_t got) {
  std::vector<FieldViolation> violations;
  violations.push_back({std::move(field), std::move(description), why, fmt::format("{}", limit),
                        fmt::format("{}", got)});
  return ErrorFromViolations(absl::StatusCode::kInvalidArgument, std::move(violations));
}

RequestError EmptyPrompt() {
  return ErrorFromViolations(absl::StatusCode::kInvalidArgument,
                             {{"prompt", "must not be empty", reason::kEmptyPrompt, "", ""}});
}

v1::FinishReason ToProto(FinishReason finish_reason) {
  switch (finish_reason) {
    case FinishReason::kEos:
      return v1::FINISH_REASON_EOS;
    case FinishReason::kStopSequence:
      return v1::FINISH_REASON_STOP_SEQUENCE;
    case FinishReason::kStopToken:
      return v1::FINISH_REASON_STOP_TOKEN;
    case FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
    case FinishReason::kContextLength:
      return v1::FINISH_REASON_CONTEXT_LENGTH;
  }
  return v1::FINISH_REASON_UNSPECIFIED;
}

Duration FromProto(const google::protobuf::Duration& duration) {
  return std::chrono::duration_cast<Duration>(std::chrono::seconds(duration.seconds()) +
                                              std::chrono::nanoseconds(duration.nanos()));
}

// The output limit that holds, or the error that prompt and asked output do not fit.
std::optional<RequestError> FitOutput(const v1::StopConditions& stop, int64_t num_prompt_tokens,
                                      int64_t context_length, StopConditions* fitted) {
  if (num_prompt_tokens >= context_length) {
    return OneViolation(reason::kContextLengthExceeded, "prompt",
                        fmt::format("no room for output (context {}, prompt {})", context_length,
                                    num_prompt_tokens),
                        context_length, num_prompt_tokens);
  }
  const int64_t room = context_length - num_prompt_tokens;
  const int64_t asked = stop.has_max_output_tokens() ? int64_t{stop.max_output_tokens()} : room;
  if (asked > room) {
    RequestError error = OneViolation(reason::kContextLengthExceeded, "stop.max_output_tokens",
                                      fmt::format("exceeds context (limit {}, got {})",
                                                  context_length, num_prompt_tokens + asked),
                                      context_length, num_prompt_tokens + asked);
    error.message = fmt::format("prompt + max_output_tokens: exceeds context (limit {}, got {})",
                                context_length, num_prompt_tokens + asked);
    return error;
  }
  if (int64_t{stop.min_output_tokens()} > asked) {
    return OneViolation(reason::kParameterOutOfRange, "stop.min_output_tokens",
                        "above max_output_tokens", asked, stop.min_output_tokens());
  }
  fitted->max_output_tokens = static_cast<int32_t>(asked);
  fitted->min_output_tokens = static_cast<int32_t>(stop.min_output_tokens());
  fitted->limited_by_context = !stop.has_max_output_tokens();
  return std::nullopt;
}

}  // namespace

RequestMapper::RequestMapper(MapperOptions options) : options_(std::move(options)) {}

std::optional<RequestError> RequestMapper::EncodePrompt(const v1::GenerateRequest& request,
                                                        std::vector<int32_t>* prompt_tokens) const {
  prompt_tokens->clear();
  if (request.has_token_ids()) {
    prompt_tokens->assign(request.token_ids().ids().begin(), request.token_ids().ids().end());
    return std::nullopt;
  }
  if (request.has_chat()) {
    absl::StatusOr<std::vector<int32_t>> ids = options_.encode_chat(request.chat());
    if (!ids.ok()) {
      return ErrorFromViolations(
          absl::StatusCode::kInvalidArgument,
          {{"prompt.chat", std::string(ids.status().message()), reason::kChatInvalid, "", ""}});
    }
    *prompt_tokens = *std::move(ids);
    return prompt_tokens->empty() ? std::optional(EmptyPrompt()) : std::nullopt;
  }
  *prompt_tokens = options_.tokenizer->Encode(request.text(), SpecialText::kPlain);
  if (prompt_tokens->empty()) return EmptyPrompt();
  if (const std::optional<int32_t> bos = options_.tokenizer->prompt_bos()) {
    prompt_tokens->insert(prompt_tokens->begin(), *bos);
  }
  return std::nullopt;
}

SamplingParams RequestMapper::EffectiveSampling(const v1::SamplingParams& sampling) const {
  SamplingParams effective = options_.defaults;
  if (sampling.has_temperature()) effective.temperature = sampling.temperature();
  if (sampling.has_top_p()) effective.top_p = sampling.top_p();
  if (sampling.has_top_k()) effective.top_k = static_cast<int32_t>(sampling.top_k());
  if (sampling.has_min_p()) effective.min_p = sampling.min_p();
  if (sampling.has_repetition_penalty()) {
    effective.repetition_penalty = sampling.repetition_penalty();
  }
  if (sampling.has_presence_penalty()) effective.presence_penalty = sampling.presence_penalty();
  if (sampling.has_frequency_penalty()) effective.frequency_penalty = sampling.frequency_penalty();
  effective.seed = sampling.has_seed() ? sampling.seed() : options_.random();
  for (const v1::LogitBias& bias : sampling.logit_bias()) {
    effective.logit_bias.push_back({static_cast<int32_t>(bias.token_id()), bias.bias()});
  }
  return effective;
}

std::optional<RequestError> CheckDeadline(const CallTimes& times) {
  constexpr Duration kLeastTimeout = std::chrono::milliseconds(1);
  if (!times.client_deadline || *times.client_deadline > times.now + kLeastTimeout) {
    return std::nullopt;
  }
  RequestError error;
  error.code = absl::StatusCode::kDeadlineExceeded;
  error.reason = reason::kDeadlineExceeded;
  error.message = "deadline has passed";
  return error;
}

bool CancelIsDeadline(TimePoint arrival, TimePoint deadline, TimePoint now) {
  constexpr Duration kTravel = std::chrono::milliseconds(50);
  const Duration timeout = deadline - arrival;
  return now >= deadline - std::min<Duration>(timeout / 50 + kTravel, timeout / 4);
}

std::optional<RequestError> RequestMapper::Build(const v1::GenerateRequest& request,
                                                 std::vector<int32_t> prompt_tokens,
                                                 const CallTimes& times,
                                                 MappedRequest* mapped) const {
  if (std::optional<RequestError> error = CheckDeadline(times)) return error;
  GenerateRequest& out = mapped->request;
  if (std::optional<RequestError> error =
          FitOutput(request.stop(), static_cast<int64_t>(prompt_tokens.size()),
                    options_.limits.context_length, &out.stop)) {
    return error;
  }
  out.request_id =
      request.request_id().empty() ? MakeRequestId(options_.random()) : request.request_id();
  out.prompt_tokens = std::move(prompt_tokens);
  out.sampling = EffectiveSampling(request.sampling());
  if (request.output().has_top_logprobs()) {
    out.sampling.top_logprobs = static_cast<int32_t>(request.output().top_logprobs());
  }
  out.stop.ignore_eos = request.stop().ignore_eos();
  out.stop.include_stop = request.stop().include_stop();
  out.stop.sequences.assign(request.stop().sequences().begin(), request.stop().sequences().end());
  out.stop.token_ids.assign(request.stop().token_ids().begin(), request.stop().token_ids().end());
  out.arrival = times.now;
  out.deadline = times.now + options_.max_request_duration;
  if (times.client_deadline) out.deadline = std::min(*out.deadline, *times.client_deadline);
  Duration queue_timeout = FromProto(request.queue_timeout());
  if (queue_timeout == Duration::zero()) queue_timeout = options_.default_queue_timeout;
  if (queue_timeout > Duration::zero()) out.queue_deadline = times.now + queue_timeout;
  out.priority = request.priority();
  out.cache_salt = request.cache_salt();
  mapped->output.omit_text = request.output().omit_text() || options_.tokenizer == nullptr;
  mapped->output.token_ids = request.output().token_ids();
  mapped->output.tokens_per_message = static_cast<int32_t>(request.output().tokens_per_message());
  return std::nullopt;
}

v1::Accepted RequestMapper::MakeAccepted(const GenerateRequest& request) const {
  v1::Accepted accepted;
  accepted.set_request_id(request.request_id);
  accepted.set_model(options_.limits.model_name);
  accepted.set_revision(options_.revision);
  accepted.set_prompt_tokens(static_cast<uint32_t>(request.prompt_tokens.size()));
  accepted.set_max_output_tokens(static_cast<uint32_t>(request.stop.max_output_tokens));
  accepted.set_seed(request.sampling.seed);
  v1::SamplingParams* sampling = accepted.mutable_sampling();
  sampling->set_temperature(request.sampling.temperature);
  sampling->set_top_p(request.sampling.top_p);
  sampling->set_top_k(static_cast<uint32_t>(request.sampling.top_k));
  sampling->set_min_p(request.sampling.min_p);
  sampling->set_repetition_penalty(request.sampling.repetition_penalty);
  sampling->set_presence_penalty(request.sampling.presence_penalty);
  sampling->set_frequency_penalty(request.sampling.frequency_penalty);
  sampling->set_seed(request.sampling.seed);
  return accepted;
}

google::protobuf::Duration ToProtoDuration(Duration duration) {
  const auto nanos =
      std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count());
  google::protobuf::Duration out;
  out.set_seconds(nanos / 1000000000);
  out.set_nanos(static_cast<int32_t>(nanos % 1000000000));
  return out;
}

v1::Finished MakeFinished(const FinishedEvent& event, const StopConditions& stop) {
  v1::Finished finished;
  finished.set_reason(ToProto(event.reason));
  if (event.matched_sequence &&
      static_cast<size_t>(*event.matched_sequence) < stop.sequences.size()) {
    finished.set_sequence(stop.sequences[static_cast<size_t>(*event.matched_sequence)]);
  } else if (event.matched_token) {
    finished.set_token_id(static_cast<uint32_t>(*event.matched_token));
  }
  v1::Usage* usage = finished.mutable_usage();
  usage->set_prompt_tokens(static_cast<uint32_t>(event.usage.prompt_tokens));
  usage->set_cached_prompt_tokens(static_cast<uint32_t>(event.usage.cached_prompt_tokens));
  usage->set_output_tokens(static_cast<uint32_t>(event.usage.output_tokens));
  usage->set_recomputed_tokens(static_cast<uint32_t>(event.usage.recomputed_tokens));
  usage->set_preemptions(static_cast<uint32_t>(event.usage.preemptions));
  v1::Timing* timing = finished.mutable_timing();
  *timing->mutable_queue() = ToProtoDuration(event.timing.queue);
  *timing->mutable_prefill() = ToProtoDuration(event.timing.prefill);
  *timing->mutable_decode() = ToProtoDuration(event.timing.decode);
  *timing->mutable_first_token() = ToProtoDuration(event.timing.first_token);
  return finished;
}

std::string MakeRequestId(uint64_t random) { return fmt::format("{:016x}", random); }

}  // namespace flashquant
