// Builds the error of a list of violations.
#include "server/request_error.h"

#include "fmt/format.h"

namespace flashquant {

RequestError ErrorFromViolations(absl::StatusCode code, std::vector<FieldViolation> violations) {
  RequestError error;
  error.code = code;
  const FieldViolation& first = violations.front();
  error.reason = first.reason;
  error.message = fmt::format("{}: {}", first.field, first.description);
  error.metadata["field"] = first.field;
  if (!first.limit.empty()) error.metadata["limit"] = first.limit;
  if (!first.got.empty()) error.metadata["got"] = first.got;
  error.violations = std::move(violations);
  return error;
}

}  // namespace flashquant
