// The one place that wires the objects of a server together, and the order in which it starts,
// drains and ends.
#pragma once

#include "server/server_config.h"
#include "server/server_security.h"

namespace flashquant {

// Where `config` has certificates and tokens.
SecurityPaths SecurityPathsOf(const ServerConfig& config);

// Serves until SIGTERM, SIGINT or a failure that it cannot go on from; returns the exit code
// (engine/base/exit_code.h). Logs to stderr; a start that fails says why there in one line. Once in
// a process, from its first thread, before there are others: signals are blocked in all of them.
int ServeUntilStopped(const ServerConfig& config);

}  // namespace flashquant
