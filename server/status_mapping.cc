// The table, and the packing of details.
#include "server/status_mapping.h"

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "engine/engine_config.h"
#include "google/protobuf/duration.pb.h"
#include "google/rpc/error_details.pb.h"
#include "server/request_mapping.h"

namespace flashquant {
namespace {

struct ReasonRow {
  const char* reason;
  absl::StatusCode code;
  const char* message;
  int retry_seconds;  // 0 = no RetryInfo
};

constexpr std::array kReasons = {
    ReasonRow{reason::kModelLoading, absl::StatusCode::kUnavailable, "model is loading", 1},
    ReasonRow{reason::kDraining, absl::StatusCode::kUnavailable, "server is shutting down", 1},
    ReasonRow{reason::kEngineFailed, absl::StatusCode::kUnavailable, "engine failed", 5},
    ReasonRow{reason::kQueueFull, absl::StatusCode::kResourceExhausted, "queue full", 1},
    ReasonRow{reason::kQueueTimeout, absl::StatusCode::kResourceExhausted,
              "waited longer than queue_timeout", 1},
    ReasonRow{reason::kSlowReader, absl::StatusCode::kResourceExhausted, "client does not read", 0},
    ReasonRow{reason::kAnswerTooLarge, absl::StatusCode::kResourceExhausted,
              "answer: too large (limit 1048576 bytes), use Generate", 0},
    ReasonRow{reason::kDeadlineExceeded, absl::StatusCode::kDeadlineExceeded, "deadline has passed",
              0},
    ReasonRow{reason::kCancelled, absl::StatusCode::kCancelled, "cancelled", 0},
    ReasonRow{reason::kCredentialsMissing, absl::StatusCode::kUnauthenticated,
              "credentials required", 0},
    // The same words: they must not tell what was wrong with a guess.
    ReasonRow{reason::kCredentialsInvalid, absl::StatusCode::kUnauthenticated,
              "credentials required", 0},
    ReasonRow{reason::kNonFiniteLogits, absl::StatusCode::kInternal,
              "model produced non-finite values", 0},
    ReasonRow{reason::kRequestNotFound, absl::StatusCode::kNotFound,
              "request_id: no open request has it", 0},
    ReasonRow{reason::kDuplicateRequestId, absl::StatusCode::kAlreadyExists,
              "request_id: already running", 0},
    ReasonRow{reason::kKvCapacityExceeded, absl::StatusCode::kInvalidArgument,
              "request needs more KV blocks than exist", 0},
    ReasonRow{reason::kContextLengthExceeded, absl::StatusCode::kInvalidArgument,
              "prompt: exceeds context", 0},
    ReasonRow{reason::kInternalError, absl::StatusCode::kInternal, "internal error", 0},
};

const ReasonRow& RowFor(std::string_view reason) {
  for (const ReasonRow& row : kReasons) {
    if (reason == row.reason) return row;
  }
  return kReasons.back();
}

// The reason of a status that carries none.
const char* DefaultReason(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kCancelled:
      return reason::kCancelled;
    case absl::StatusCode::kDeadlineExceeded:
      return reason::kDeadlineExceeded;
    case absl::StatusCode::kResourceExhausted:
      return reason::kQueueFull;
    case absl::StatusCode::kUnavailable:
      return reason::kEngineFailed;
    case absl::StatusCode::kAlreadyExists:
      return reason::kDuplicateRequestId;
    default:
      return reason::kInternalError;
  }
}

// The payloads of WithSubject as metadata, and as the one violation of an invalid argument.
void AddSubject(const absl::Status& status, RequestError* error) {
  for (const char* key : kErrorSubjectKeys) {
    const auto value = status.GetPayload(kErrorSubjectPrefix + std::string(key));
    if (value) error->metadata[key] = std::string(*value);
  }
  const auto field = error->metadata.find("field");
  if (error->code != absl::StatusCode::kInvalidArgument || field == error->metadata.end()) return;
  FieldViolation violation;
  violation.field = field->second;
  const std::string prefix = violation.field + ": ";
  violation.description =
      error->message.starts_with(prefix) ? error->message.substr(prefix.size()) : error->message;
  violation.reason = error->reason;
  error->violations.push_back(std::move(violation));
}

}  // namespace

RequestError ErrorForReason(std::string_view reason) {
  const ReasonRow& row = RowFor(reason);
  RequestError error;
  error.code = row.code;
  error.reason = row.reason;
  error.message = row.message;
  if (row.retry_seconds > 0) error.retry_delay = std::chrono::seconds(row.retry_seconds);
  return error;
}

RequestError ErrorFromSubmit(const absl::Status& status) {
  const std::optional<absl::Cord> payload = [&]() -> std::optional<absl::Cord> {
    const auto found = status.GetPayload(kErrorReasonPayload);
    if (!found) return std::nullopt;
    return *found;
  }();
  const std::string why = payload ? std::string(*payload) : DefaultReason(status.code());
  RequestError error = ErrorForReason(why);
  if (error.reason == reason::kInternalError) return error;
  error.message = std::string(status.message());
  AddSubject(status, &error);
  return error;
}

RequestError ErrorFromFinished(const FinishedEvent& event) {
  return ErrorForReason(event.error_reason.empty() ? DefaultReason(event.status.code())
                                                   : event.error_reason);
}

google::rpc::Status ToRpcStatus(const RequestError& error) {
  google::rpc::Status status;
  status.set_code(static_cast<int>(error.code));
  status.set_message(error.message);
  google::rpc::ErrorInfo info;
  info.set_reason(error.reason);
  info.set_domain(kErrorDomain);
  for (const auto& [key, value] : error.metadata) (*info.mutable_metadata())[key] = value;
  status.add_details()->PackFrom(info);
  if (!error.violations.empty()) {
    google::rpc::BadRequest bad_request;
    for (const FieldViolation& violation : error.violations) {
      auto* out = bad_request.add_field_violations();
      out->set_field(violation.field);
      out->set_description(violation.description);
    }
    status.add_details()->PackFrom(bad_request);
  }
  if (error.retry_delay) {
    google::rpc::RetryInfo retry;
    *retry.mutable_retry_delay() = ToProtoDuration(*error.retry_delay);
    status.add_details()->PackFrom(retry);
  }
  return status;
}

grpc::Status ToGrpcStatus(const RequestError& error) {
  // absl and gRPC number their codes alike.
  return grpc::Status(static_cast<grpc::StatusCode>(error.code), error.message,
                      ToRpcStatus(error).SerializeAsString());
}

const char* StatusCodeName(int grpc_code) {
  static constexpr std::array kNames = {"OK",
                                        "CANCELLED",
                                        "UNKNOWN",
                                        "INVALID_ARGUMENT",
                                        "DEADLINE_EXCEEDED",
                                        "NOT_FOUND",
                                        "ALREADY_EXISTS",
                                        "PERMISSION_DENIED",
                                        "RESOURCE_EXHAUSTED",
                                        "FAILED_PRECONDITION",
                                        "ABORTED",
                                        "OUT_OF_RANGE",
                                        "UNIMPLEMENTED",
                                        "INTERNAL",
                                        "UNAVAILABLE",
                                        "DATA_LOSS",
                                        "UNAUTHENTICATED"};
  if (grpc_code < 0 || grpc_code >= static_cast<int>(kNames.size())) return "UNKNOWN";
  return kNames[static_cast<size_t>(grpc_code)];
}

}  // namespace flashquant
