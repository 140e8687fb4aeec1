// The log of the server: one line per event on stderr, counted by level. Prompts and answers are
// never logged. gRPC's own lines are taken in, at most one warning a minute.
#pragma once

#include <functional>
#include <string_view>

#include "engine/metrics.h"

namespace flashquant {

// Sets spdlog's default logger. `level`: debug, info, warning, error. `metrics` may be null and
// outlives all logging. Call once, before threads log.
void InitLogging(std::string_view level, Metrics* metrics);

// Calls `on_failure`, from any thread, for each TLS handshake that fails. gRPC 1.51 tells of them
// in its log alone, so its lines are all read from now on; they are still shown only as described
// above. Once, after InitLogging.
void WatchHandshakes(std::function<void()> on_failure);

}  // namespace flashquant
