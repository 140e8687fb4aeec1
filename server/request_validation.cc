// The checks in the order of the fields; each adds to one list.
#include "server/request_validation.h"

#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/utf8.h"

namespace flashquant {
namespace {

// Collects violations; what is merely not built is kept apart, because a wrong value matters more.
class Violations {
 public:
  void Add(const char* why, std::string field, std::string description, std::string limit = "",
           std::string got = "") {
    if (wrong_.size() >= RequestLimits::kMaxReportedViolations) return;
    wrong_.push_back(
        {std::move(field), std::move(description), why, std::move(limit), std::move(got)});
  }
  void AddNotBuilt(std::string field, std::string description) {
    if (not_built_.size() >= RequestLimits::kMaxReportedViolations) return;
    not_built_.push_back(
        {std::move(field), std::move(description), reason::kFeatureDisabled, "", ""});
  }
  // "name: too long (limit 5 bytes, got 6)"
  void AddTooLong(const char* why, std::string field, int64_t limit, int64_t got) {
    Add(why, std::move(field), fmt::format("too long (limit {} bytes, got {})", limit, got),
        fmt::format("{}", limit), fmt::format("{}", got));
  }
  void AddTooMany(const char* why, std::string field, int64_t limit, int64_t got) {
    Add(why, std::move(field), fmt::format("too many (limit {}, got {})", limit, got),
        fmt::format("{}", limit), fmt::format("{}", got));
  }
  void AddIdOutOfRange(const char* why, std::string field, int64_t limit, uint32_t got) {
    Add(why, std::move(field), fmt::format("out of range (limit {}, got {})", limit, got),
        fmt::format("{}", limit), fmt::format("{}", got));
  }
  // `valid` false adds `rule`; NaN and infinity have their own reason.
  void CheckNumber(std::string field, float value, bool valid, const char* rule) {
    if (std::isfinite(value) && valid) return;
    Add(std::isfinite(value) ? reason::kParameterOutOfRange : reason::kParameterNotFinite,
        std::move(field), rule);
  }

  std::optional<RequestError> Take() {
    if (!wrong_.empty()) {
      return ErrorFromViolations(absl::StatusCode::kInvalidArgument, std::move(wrong_));
    }
    if (!not_built_.empty()) {
      return ErrorFromViolations(absl::StatusCode::kUnimplemented, std::move(not_built_));
    }
    return std::nullopt;
  }

 private:
  std::vector<FieldViolation> wrong_;
  std::vector<FieldViolation> not_built_;
};

constexpr char kNotBuilt[] = "not available in this version";

std::optional<RequestError> CheckModelName(const std::string& name, const RequestLimits& limits) {
  if (name.empty() || name == limits.model_name) return std::nullopt;
  RequestError error;
  error.code = absl::StatusCode::kNotFound;
  error.reason = reason::kModelNotFound;
  error.message = "model: unknown";
  error.metadata["field"] = "model";
  return error;
}

void CheckTextBytes(const std::string& text, const char* field, Violations* out) {
  if (static_cast<int64_t>(text.size()) > RequestLimits::kMaxPromptBytes) {
    out->AddTooLong(reason::kPromptTooLong, field, RequestLimits::kMaxPromptBytes,
                    static_cast<int64_t>(text.size()));
  } else if (const std::optional<size_t> bad = FindInvalidUtf8(text)) {
    out->Add(reason::kInvalidUtf8, field, fmt::format("not valid UTF-8 at byte {}", *bad), "",
             fmt::format("{}", *bad));
  }
}

void CheckChat(const v1::ChatPrompt& chat, const RequestLimits& limits, Violations* out) {
  if (!limits.has_chat_format) {
    out->AddNotBuilt("prompt.chat", limits.chat_refusal);
  }
  if (chat.messages_size() == 0) {
    out->Add(reason::kEmptyPrompt, "prompt", "must not be empty");
    return;
  }
  if (chat.messages_size() > RequestLimits::kMaxChatMessages) {
    out->AddTooMany(reason::kPromptTooLong, "prompt.chat.messages", RequestLimits::kMaxChatMessages,
                    chat.messages_size());
    return;
  }
  int64_t total_bytes = 0;
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& message = chat.messages(i);
    if (message.role() != "system" && message.role() != "user" && message.role() != "assistant") {
      out->Add(reason::kChatInvalid, fmt::format("prompt.chat.messages[{}].role", i),
               "must be system, user or assistant");
    }
    total_bytes += static_cast<int64_t>(message.content().size());
    CheckTextBytes(message.content(), fmt::format("prompt.chat.messages[{}].content", i).c_str(),
                   out);
  }
  if (total_bytes > RequestLimits::kMaxPromptBytes) {
    out->AddTooLong(reason::kPromptTooLong, "prompt.chat", RequestLimits::kMaxPromptBytes,
                    total_bytes);
  }
}

void CheckTokenIds(const v1::TokenIds& token_ids, const RequestLimits& limits, Violations* out) {
  if (token_ids.ids_size() == 0) {
    out->Add(reason::kEmptyPrompt, "prompt", "must not be empty");
  }
  for (int i = 0; i < token_ids.ids_size(); ++i) {
    if (token_ids.ids(i) >= static_cast<uint32_t>(limits.vocab_size)) {
      // The first says enough; a list may hold a million.
      out->AddIdOutOfRange(reason::kTokenIdOutOfRange, fmt::format("prompt.token_ids[{}]", i),
                           limits.vocab_size, token_ids.ids(i));
      return;
    }
  }
}

void CheckPrompt(const v1::GenerateRequest& request, const RequestLimits& limits, Violations* out) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText:
      if (!limits.has_tokenizer) {
        out->AddNotBuilt("prompt.text", "this model has no tokenizer, send token_ids");
      }
      if (request.text().empty()) {
        out->Add(reason::kEmptyPrompt, "prompt", "must not be empty");
      }
      CheckTextBytes(request.text(), "prompt.text", out);
      return;
    case v1::GenerateRequest::kTokenIds:
      CheckTokenIds(request.token_ids(), limits, out);
      return;
    case v1::GenerateRequest::kChat:
      CheckChat(request.chat(), limits, out);
      return;
    case v1::GenerateRequest::PROMPT_NOT_SET:
      out->Add(reason::kEmptyPrompt, "prompt", "required");
      return;
  }
}

void CheckLogitBias(const v1::SamplingParams& sampling, const RequestLimits& limits,
                    Violations* out) {
  if (sampling.logit_bias_size() == 0) return;
  if (sampling.logit_bias_size() > RequestLimits::kMaxLogitBiases) {
    out->AddTooMany(reason::kLogitBiasInvalid, "sampling.logit_bias",
                    RequestLimits::kMaxLogitBiases, sampling.logit_bias_size());
    return;
  }
  std::set<uint32_t> seen;
  for (int i = 0; i < sampling.logit_bias_size(); ++i) {
    const v1::LogitBias& entry = sampling.logit_bias(i);
    const std::string field = fmt::format("sampling.logit_bias[{}]", i);
    if (entry.token_id() >= static_cast<uint32_t>(limits.vocab_size)) {
      out->AddIdOutOfRange(reason::kLogitBiasInvalid, field + ".token_id", limits.vocab_size,
                           entry.token_id());
    } else if (!seen.insert(entry.token_id()).second) {
      out->Add(reason::kLogitBiasInvalid, field + ".token_id", "given twice");
    }
    if (!(entry.bias() >= -100.0f && entry.bias() <= 100.0f)) {
      out->Add(reason::kLogitBiasInvalid, field + ".bias", "must be within -100 and 100");
    }
  }
}

void CheckPenalties(const v1::SamplingParams& sampling, Violations* out) {
  const float repetition = sampling.repetition_penalty();
  if (sampling.has_repetition_penalty()) {
    out->CheckNumber("sampling.repetition_penalty", repetition,
                     std::isnormal(repetition) && repetition > 0.0f && repetition <= 2.0f,
                     "must be above 0 and at most 2");
  }
  const auto check = [&](bool has, float value, const char* field) {
    if (!has) return;
    out->CheckNumber(field, value, value >= -2.0f && value <= 2.0f, "must be within -2 and 2");
  };
  check(sampling.has_presence_penalty(), sampling.presence_penalty(), "sampling.presence_penalty");
  check(sampling.has_frequency_penalty(), sampling.frequency_penalty(),
        "sampling.frequency_penalty");
}

void CheckSampling(const v1::SamplingParams& sampling, const RequestLimits& limits,
                   Violations* out) {
  if (sampling.has_temperature()) {
    const float value = sampling.temperature();
    out->CheckNumber("sampling.temperature", value, value >= 0.0f && value <= 2.0f,
                     "must be within 0 and 2");
  }
  if (sampling.has_top_p()) {
    const float value = sampling.top_p();
    out->CheckNumber("sampling.top_p", value, value > 0.0f && value <= 1.0f,
                     "must be above 0 and at most 1");
  }
  if (sampling.top_k() > static_cast<uint32_t>(limits.vocab_size)) {
    out->Add(reason::kParameterOutOfRange, "sampling.top_k",
             fmt::format("above vocabulary size (limit {})", limits.vocab_size),
             fmt::format("{}", limits.vocab_size), fmt::format("{}", sampling.top_k()));
  }
  if (sampling.has_min_p()) {
    const float value = sampling.min_p();
    out->CheckNumber("sampling.min_p", value, value >= 0.0f && value <= 1.0f,
                     "must be within 0 and 1");
  }
  CheckPenalties(sampling, out);
  CheckLogitBias(sampling, limits, out);
}

void CheckStopSequences(const v1::StopConditions& stop, const RequestLimits& limits,
                        Violations* out) {
  if (stop.sequences_size() == 0) return;
  if (stop.sequences_size() > RequestLimits::kMaxStopSequences) {
    out->AddTooMany(reason::kTooManyStopSequences, "stop.sequences",
                    RequestLimits::kMaxStopSequences, stop.sequences_size());
    return;
  }
  for (int i = 0; i < stop.sequences_size(); ++i) {
    const std::string& text = stop.sequences(i);
    const std::string field = fmt::format("stop.sequences[{}]", i);
    if (text.empty()) {
      out->Add(reason::kStopSequenceInvalid, field, "must not be empty");
    } else if (text.size() > RequestLimits::kMaxStopSequenceBytes) {
      out->AddTooLong(reason::kStopSequenceInvalid, field, RequestLimits::kMaxStopSequenceBytes,
                      static_cast<int64_t>(text.size()));
    } else if (const std::optional<size_t> bad = FindInvalidUtf8(text)) {
      out->Add(reason::kStopSequenceInvalid, field,
               fmt::format("not valid UTF-8 at byte {}", *bad));
    }
  }
  if (!limits.has_tokenizer) {
    out->AddNotBuilt("stop.sequences", "this model has no tokenizer, use stop.token_ids");
  }
}

void CheckStop(const v1::StopConditions& stop, const RequestLimits& limits, Violations* out) {
  if (stop.has_max_output_tokens()) {
    if (stop.max_output_tokens() == 0) {
      out->Add(reason::kParameterOutOfRange, "stop.max_output_tokens", "must be at least 1", "1",
               "0");
    } else if (stop.min_output_tokens() > stop.max_output_tokens()) {
      out->Add(reason::kParameterOutOfRange, "stop.min_output_tokens", "above max_output_tokens",
               fmt::format("{}", stop.max_output_tokens()),
               fmt::format("{}", stop.min_output_tokens()));
    }
  }
  CheckStopSequences(stop, limits, out);
  if (stop.token_ids_size() > RequestLimits::kMaxStopTokenIds) {
    out->AddTooMany(reason::kParameterOutOfRange, "stop.token_ids", RequestLimits::kMaxStopTokenIds,
                    stop.token_ids_size());
    return;
  }
  for (int i = 0; i < stop.token_ids_size(); ++i) {
    if (stop.token_ids(i) >= static_cast<uint32_t>(limits.vocab_size)) {
      out->AddIdOutOfRange(reason::kTokenIdOutOfRange, fmt::format("stop.token_ids[{}]", i),
                           limits.vocab_size, stop.token_ids(i));
    }
  }
}

void CheckOutput(const v1::OutputOptions& output, Violations* out) {
  if (output.has_top_logprobs()) {
    if (output.top_logprobs() > RequestLimits::kMaxTopLogprobs) {
      out->Add(reason::kParameterOutOfRange, "output.top_logprobs",
               fmt::format("above {}", RequestLimits::kMaxTopLogprobs),
               fmt::format("{}", RequestLimits::kMaxTopLogprobs),
               fmt::format("{}", output.top_logprobs()));
    }
  }
  if (output.tokens_per_message() > RequestLimits::kMaxTokensPerMessage) {
    out->Add(reason::kParameterOutOfRange, "output.tokens_per_message",
             fmt::format("above {}", RequestLimits::kMaxTokensPerMessage),
             fmt::format("{}", RequestLimits::kMaxTokensPerMessage),
             fmt::format("{}", output.tokens_per_message()));
  }
}

void CheckScheduling(const v1::GenerateRequest& request, Violations* out) {
  constexpr int kMax = RequestLimits::kMaxPriority;
  if (request.priority() < -kMax || request.priority() > kMax) {
    out->Add(reason::kParameterOutOfRange, "priority",
             fmt::format("must be within -{} and {}", kMax, kMax), fmt::format("{}", kMax),
             fmt::format("{}", request.priority()));
  }
  const google::protobuf::Duration& timeout = request.queue_timeout();
  if (timeout.seconds() < 0 || timeout.seconds() > RequestLimits::kMaxQueueTimeoutSeconds ||
      timeout.nanos() < 0 || timeout.nanos() > 999999999) {
    out->Add(reason::kParameterOutOfRange, "queue_timeout",
             fmt::format("must be within 0 and {} s", RequestLimits::kMaxQueueTimeoutSeconds));
  }
  if (request.cache_salt().size() > RequestLimits::kMaxCacheSaltBytes) {
    out->AddTooLong(reason::kParameterOutOfRange, "cache_salt", RequestLimits::kMaxCacheSaltBytes,
                    static_cast<int64_t>(request.cache_salt().size()));
  }
}

// A newer client's unknown fields are ignored, but the numbers kept for features that change what
// an answer is (samples, adapters, constraints) must not be ignored silently.
void CheckReservedFields(const v1::GenerateRequest& request, Violations* out) {
  const google::protobuf::UnknownFieldSet& unknown =
      request.GetReflection()->GetUnknownFields(request);
  for (int i = 0; i < unknown.field_count(); ++i) {
    const int number = unknown.field(i).number();
    if (number >= 12 && number <= 15) {
      out->AddNotBuilt(fmt::format("field {}", number), kNotBuilt);
    }
  }
}

}  // namespace

bool IsValidRequestId(std::string_view id) {
  if (id.empty() || id.size() > RequestLimits::kMaxRequestIdChars) return false;
  for (const char c : id) {
    const bool allowed = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                         (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
    if (!allowed) return false;
  }
  return true;
}

std::optional<RequestError> ValidateGenerate(const v1::GenerateRequest& request,
                                             const RequestLimits& limits) {
  if (std::optional<RequestError> error = CheckModelName(request.model(), limits)) return error;
  Violations violations;
  if (!request.request_id().empty() && !IsValidRequestId(request.request_id())) {
    violations.Add(reason::kRequestIdInvalid, "request_id",
                   "must be at most 64 letters, digits, '.', '_' or '-'");
  }
  CheckPrompt(request, limits, &violations);
  CheckSampling(request.sampling(), limits, &violations);
  CheckStop(request.stop(), limits, &violations);
  CheckOutput(request.output(), &violations);
  CheckScheduling(request, &violations);
  CheckReservedFields(request, &violations);
  return violations.Take();
}

std::optional<RequestError> ValidateTokenize(const v1::TokenizeRequest& request,
                                             const RequestLimits& limits) {
  if (std::optional<RequestError> error = CheckModelName(request.model(), limits)) return error;
  Violations violations;
  if (!limits.has_tokenizer) violations.AddNotBuilt("text", "this model has no tokenizer");
  CheckTextBytes(request.text(), "text", &violations);
  return violations.Take();
}

RequestError TextTooLong() {
  Violations violations;
  violations.Add(reason::kParameterOutOfRange, "token_ids",
                 fmt::format("text too long (limit {} bytes), send fewer",
                             RequestLimits::kMaxDetokenizedBytes),
                 fmt::format("{}", RequestLimits::kMaxDetokenizedBytes));
  return *violations.Take();
}

std::optional<RequestError> ValidateDetokenize(const v1::DetokenizeRequest& request,
                                               const RequestLimits& limits) {
  if (std::optional<RequestError> error = CheckModelName(request.model(), limits)) return error;
  Violations violations;
  if (!limits.has_tokenizer) violations.AddNotBuilt("token_ids", "this model has no tokenizer");
  if (request.token_ids_size() > RequestLimits::kMaxDetokenizeIds) {
    violations.AddTooMany(reason::kParameterOutOfRange, "token_ids",
                          RequestLimits::kMaxDetokenizeIds, request.token_ids_size());
    return violations.Take();
  }
  for (int i = 0; i < request.token_ids_size(); ++i) {
    if (request.token_ids(i) >= static_cast<uint32_t>(limits.vocab_size)) {
      violations.AddIdOutOfRange(reason::kTokenIdOutOfRange, fmt::format("token_ids[{}]", i),
                                 limits.vocab_size, request.token_ids(i));
      break;
    }
  }
  return violations.Take();
}

std::optional<RequestError> ValidateGetModel(const v1::GetModelRequest& request,
                                             const RequestLimits& limits) {
  return CheckModelName(request.model(), limits);
}

}  // namespace flashquant
