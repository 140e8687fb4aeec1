// The log of the server: one line per event on stderr, counted by level. Prompts and answers are
// never logged. gRPC's own lines are taken in, at most one warning a minute.
#pragma once

#include <string_view>

#include "engine/metrics.h"

namespace flashquant {

// Sets spdlog's default logger. `level`: debug, info, warning, error. `metrics` may be null and
// outlives all logging. Call once, before threads log.
void InitLogging(std::string_view level, Metrics* metrics);

}  // namespace flashquant
