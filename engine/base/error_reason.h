// ErrorInfo reason of a status ("QUEUE_FULL"): a payload that the server turns into error details.
#pragma once

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

}  // namespace flashquant
