// RequestError: why a request is refused or ended, before it becomes the status of an RPC.
//
// Plain data without gRPC or Protobuf, so that request checks stay pure and fuzzable.
// status_mapping.h turns it into a status with google.rpc details. The reasons are listed for
// clients in proto/flashquant/v1/errors.md.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/clock.h"

namespace flashquant {

inline constexpr char kErrorDomain[] = "flashquant.dev";

namespace reason {
inline constexpr char kMalformedRequest[] = "MALFORMED_REQUEST";
inline constexpr char kEmptyPrompt[] = "EMPTY_PROMPT";
inline constexpr char kInvalidUtf8[] = "INVALID_UTF8";
inline constexpr char kTokenIdOutOfRange[] = "TOKEN_ID_OUT_OF_RANGE";
inline constexpr char kPromptTooLong[] = "PROMPT_TOO_LONG";
inline constexpr char kContextLengthExceeded[] = "CONTEXT_LENGTH_EXCEEDED";
inline constexpr char kKvCapacityExceeded[] = "KV_CAPACITY_EXCEEDED";
inline constexpr char kParameterOutOfRange[] = "PARAMETER_OUT_OF_RANGE";
inline constexpr char kParameterNotFinite[] = "PARAMETER_NOT_FINITE";
inline constexpr char kTooManyStopSequences[] = "TOO_MANY_STOP_SEQUENCES";
inline constexpr char kStopSequenceInvalid[] = "STOP_SEQUENCE_INVALID";
inline constexpr char kLogitBiasInvalid[] = "LOGIT_BIAS_INVALID";
inline constexpr char kRequestIdInvalid[] = "REQUEST_ID_INVALID";
inline constexpr char kChatInvalid[] = "CHAT_INVALID";
inline constexpr char kDuplicateRequestId[] = "DUPLICATE_REQUEST_ID";
inline constexpr char kModelNotFound[] = "MODEL_NOT_FOUND";
inline constexpr char kRequestNotFound[] = "REQUEST_NOT_FOUND";
inline constexpr char kModelLoading[] = "MODEL_LOADING";
inline constexpr char kDraining[] = "DRAINING";
inline constexpr char kEngineFailed[] = "ENGINE_FAILED";
inline constexpr char kQueueFull[] = "QUEUE_FULL";
inline constexpr char kQueueTimeout[] = "QUEUE_TIMEOUT";
inline constexpr char kSlowReader[] = "SLOW_READER";
inline constexpr char kAnswerTooLarge[] = "ANSWER_TOO_LARGE";
inline constexpr char kDeadlineExceeded[] = "DEADLINE_EXCEEDED";
inline constexpr char kCancelled[] = "CANCELLED";
inline constexpr char kCredentialsMissing[] = "CREDENTIALS_MISSING";
inline constexpr char kCredentialsInvalid[] = "CREDENTIALS_INVALID";
inline constexpr char kFeatureDisabled[] = "FEATURE_DISABLED";
inline constexpr char kNonFiniteLogits[] = "NON_FINITE_LOGITS";
inline constexpr char kInternalError[] = "INTERNAL_ERROR";
}  // namespace reason

// One field that is wrong. `limit` and `got` are numbers or names from our own tables, or empty.
struct FieldViolation {
  std::string field;
  std::string description;
  std::string reason;
  std::string limit;
  std::string got;
};

struct RequestError {
  absl::StatusCode code = absl::StatusCode::kInternal;
  std::string reason;
  std::string message;
  std::map<std::string, std::string> metadata;  // ErrorInfo.metadata
  std::vector<FieldViolation> violations;       // BadRequest
  std::optional<Duration> retry_delay;          // RetryInfo
};

// The error of a request with these violations (at least one): the first gives message and reason.
RequestError ErrorFromViolations(absl::StatusCode code, std::vector<FieldViolation> violations);

}  // namespace flashquant
