// Error handling helpers: macros that pass absl::Status up, and formatted error makers.
//
// Every error text says what, where, found and allowed (README.md, "Errors"); it never holds prompt
// text or addresses. Debian's Abseil has no such macros and its StrCat does not take
// std::string_view, hence fmt.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fmt/format.h"

// Returns from the enclosing function if `expr` (an absl::Status) is not OK.
#define FQ_RETURN_IF_ERROR(expr)             \
  do {                                       \
    ::absl::Status fq_status_ = (expr);      \
    if (!fq_status_.ok()) return fq_status_; \
  } while (false)

#define FQ_STATUS_CONCAT_INNER_(a, b) a##b
#define FQ_STATUS_CONCAT_(a, b) FQ_STATUS_CONCAT_INNER_(a, b)

// FQ_ASSIGN_OR_RETURN(auto x, F()): assigns the value of a StatusOr or returns its status.
#define FQ_ASSIGN_OR_RETURN(lhs, expr) \
  FQ_ASSIGN_OR_RETURN_IMPL_(FQ_STATUS_CONCAT_(fq_statusor_, __LINE__), lhs, expr)
#define FQ_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                              \
  if (!statusor.ok()) return statusor.status();        \
  lhs = *std::move(statusor)

namespace flashquant {

// One maker per status code that we use: InvalidArgumentError("k: {} above {}", k, limit).
#define FQ_DEFINE_ERROR_MAKER_(Name, Code)                                                       \
  template <typename... Args>                                                                    \
  [[nodiscard]] absl::Status Name(fmt::format_string<Args...> text, Args&&... args) {            \
    return absl::Status(absl::StatusCode::Code, fmt::format(text, std::forward<Args>(args)...)); \
  }

FQ_DEFINE_ERROR_MAKER_(InvalidArgumentError, kInvalidArgument)
FQ_DEFINE_ERROR_MAKER_(FailedPreconditionError, kFailedPrecondition)
FQ_DEFINE_ERROR_MAKER_(NotFoundError, kNotFound)
FQ_DEFINE_ERROR_MAKER_(AlreadyExistsError, kAlreadyExists)
FQ_DEFINE_ERROR_MAKER_(PermissionDeniedError, kPermissionDenied)
FQ_DEFINE_ERROR_MAKER_(ResourceExhaustedError, kResourceExhausted)
FQ_DEFINE_ERROR_MAKER_(UnavailableError, kUnavailable)
FQ_DEFINE_ERROR_MAKER_(UnimplementedError, kUnimplemented)
FQ_DEFINE_ERROR_MAKER_(DataLossError, kDataLoss)
FQ_DEFINE_ERROR_MAKER_(InternalError, kInternal)
FQ_DEFINE_ERROR_MAKER_(CancelledError, kCancelled)
FQ_DEFINE_ERROR_MAKER_(DeadlineExceededError, kDeadlineExceeded)
#undef FQ_DEFINE_ERROR_MAKER_

// Puts "context: " before the message and keeps the code; OK stays OK.
[[nodiscard]] inline absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), fmt::format("{}: {}", context, std::string(status.message())));
}

}  // namespace flashquant
