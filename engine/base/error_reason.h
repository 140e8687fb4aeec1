// ErrorInfo reason of a status ("QUEUE_FULL"), and which field and numbers it is about: payloads
// that the server turns into error details.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace flashquant {

// Key of the payload.
inline constexpr char kErrorReasonPayload[] = "flashquant.dev/reason";

// `status` (not OK) with `reason` attached.
[[nodiscard]] inline absl::Status WithReason(absl::Status status, std::string_view reason) {
  status.SetPayload(kErrorReasonPayload,
                    absl::Cord(absl::string_view(reason.data(), reason.size())));
  return status;
}

// The attached reason, "" when there is none.
inline std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrorReasonPayload);
  return payload.has_value() ? std::string(*payload) : std::string();
}

// The message without a copy: it may say that memory is short. Lives as long as `status`.
inline std::string_view MessageOf(const absl::Status& status) {
  return {status.message().data(), status.message().size()};
}

// What an error is about. Every member may be missing.
struct ErrorSubject {
  std::string field = {};  // as clients name it: "stop.max_output_tokens"
  std::optional<int64_t> limit = std::nullopt;
  std::optional<int64_t> got = std::nullopt;
};

// Keys of the payloads, "flashquant.dev/" and the names of ErrorInfo's metadata.
inline constexpr char kErrorSubjectPrefix[] = "flashquant.dev/";
inline constexpr std::array kErrorSubjectKeys = {"field", "limit", "got"};

// `status` (not OK) with `subject` attached.
[[nodiscard]] inline absl::Status WithSubject(absl::Status status, const ErrorSubject& subject) {
  const auto attach = [&status](const char* key, const std::string& value) {
    status.SetPayload(kErrorSubjectPrefix + std::string(key), absl::Cord(value));
  };
  if (!subject.field.empty()) attach("field", subject.field);
  if (subject.limit.has_value()) attach("limit", std::to_string(*subject.limit));
  if (subject.got.has_value()) attach("got", std::to_string(*subject.got));
  return status;
}

// Refuses one request because there is no memory for it.
[[nodiscard]] inline absl::Status NoMemoryError() {
  return WithReason(absl::ResourceExhaustedError("no memory for another request"), "QUEUE_FULL");
}

}  // namespace flashquant
