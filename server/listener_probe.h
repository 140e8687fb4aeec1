// Whether a listening port still answers: the server's look at itself.
//
// gRPC 1.51 never accepts again after one time without a file descriptor, while the kernel goes on
// completing connections. So a connection alone proves nothing: the probe waits for a first byte.
#pragma once

#include <string>

#include "engine/base/clock.h"

namespace flashquant {

// Connects to `host` (numeric; a wildcard address or a name means loopback), says what opens HTTP/2
// or TLS, and waits for the first byte of an answer. Blocks for at most `limit`.
bool ListenerAnswers(const std::string& host, int port, bool tls, Duration limit);

}  // namespace flashquant
