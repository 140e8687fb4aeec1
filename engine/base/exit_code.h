// Exit codes of the program, one per kind of failure (sysexits numbers), so that a supervisor can
// tell them apart.
#pragma once

#include <cstdio>
#include <string>

#include "absl/status/status.h"

namespace flashquant {

inline constexpr int kExitUsage = 64;    // wrong flags
inline constexpr int kExitBadData = 65;  // bad model, tokenizer or weight data; unsupported format
inline constexpr int kExitNoInput = 66;  // file missing
inline constexpr int kExitUnavailable = 69;  // device or server unavailable
inline constexpr int kExitInternal = 70;
inline constexpr int kExitSystem = 71;  // system resource: port, descriptors, threads, memory
inline constexpr int kExitNoPermission = 77;
inline constexpr int kExitBadConfig = 78;

// The exit code for a command that ended with `status`; 0 for OK.
inline int ExitCodeFor(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 0;
    case absl::StatusCode::kInvalidArgument:
      return kExitUsage;
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kUnimplemented:
      return kExitBadData;
    case absl::StatusCode::kNotFound:
      return kExitNoInput;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return kExitUnavailable;
    case absl::StatusCode::kResourceExhausted:
      return kExitSystem;
    case absl::StatusCode::kPermissionDenied:
      return kExitNoPermission;
    case absl::StatusCode::kFailedPrecondition:
      return kExitBadConfig;
    default:
      return kExitInternal;
  }
}

// Ends a command: prints "flashquant: ‹message›" to stderr unless OK, and returns the exit code.
inline int ReportStatus(const absl::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "flashquant: %s\n", std::string(status.message()).c_str());
  }
  return ExitCodeFor(status);
}

}  // namespace flashquant
