// Runs an off-line subcommand to its end: what is still buffered for standard output is written,
// and memory or a system resource that ran out ends it as that, not as an internal error.
#pragma once

#include <cerrno>
#include <cstdio>
#include <new>
#include <system_error>

#include "absl/status/status.h"
#include "engine/base/exit_code.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

// The exit code for what `run` (a callable that returns absl::Status) ended with; its message goes
// to stderr. ResourceExhausted: memory, threads, or standard output that cannot be written.
template <typename Run>
int RunTool(Run&& run) {
  absl::Status status;
  try {
    status = run();
  } catch (const std::bad_alloc&) {
    status = ResourceExhaustedError("out of memory");
  } catch (const std::system_error& error) {  // of a thread's start, a print, a path
    status = error.code() == std::errc::permission_denied
                 ? PermissionDeniedError("{}", error.what())
                 : ResourceExhaustedError("{}", error.what());
  }
  const bool failed_before = std::ferror(stdout) != 0;
  if (const bool flushed = std::fflush(stdout) == 0; (!flushed || failed_before) && status.ok()) {
    status = ResourceExhaustedError("standard output: write: {}",
                                    flushed ? "failed" : std::generic_category().message(errno));
  }
  std::clearerr(stdout);
  return ReportStatus(status);
}

}  // namespace flashquant
