// A small model's limits, and the outcome of a check in comparable form.
#pragma once

#include <optional>
#include <ostream>
#include <string>

#include "server/request_validation.h"

namespace flashquant {

inline constexpr int kVocabulary = 1000;

inline RequestLimits Limits() {
  RequestLimits limits;
  limits.model_name = "tiny";
  limits.vocab_size = kVocabulary;
  limits.context_length = 64;
  limits.has_tokenizer = true;
  limits.has_chat_format = true;
  return limits;
}

inline v1::GenerateRequest TextRequest() {
  v1::GenerateRequest request;
  request.set_text("hello");
  return request;
}

struct Outcome {
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string reason;
  std::string message;
  bool operator==(const Outcome&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  return out << static_cast<int>(outcome.code) << " [" << outcome.reason << "] " << outcome.message;
}

inline Outcome Check(const v1::GenerateRequest& request, const RequestLimits& limits = Limits()) {
  const std::optional<RequestError> error = ValidateGenerate(request, limits);
  if (!error) return {};
  return {error->code, error->reason, error->message};
}

inline Outcome Invalid(const char* reason, const char* message) {
  return {absl::StatusCode::kInvalidArgument, reason, message};
}

inline Outcome NotBuilt(const std::string& field) {
  return {absl::StatusCode::kUnimplemented, reason::kFeatureDisabled,
          field + ": not available in this version"};
}

}  // namespace flashquant
