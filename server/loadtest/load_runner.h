// LoadRunner: sends the calls of a plan to a server, at their intended times whatever becomes of
// the earlier ones (open loop), or a fixed number at once (closed loop), and records what came
// back.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "server/inference_client.h"
#include "server/loadtest/load_plan.h"
#include "server/loadtest/load_report.h"

namespace flashquant {

struct LoadRunOptions {
  std::string target;
  ClientSecurity security;
  int connections = 4;           // calls go to them in turn
  int concurrency = 0;           // > 0: closed loop
  double duration_seconds = 30;  // of a closed loop
  double grace_seconds = 30;     // how long calls may go on after the last was sent
  float temperature = 0;         // 0 = greedy
};

// Sums so far.
struct LoadProgress {
  double seconds = 0;
  int64_t sent = 0;
  int64_t ended = 0;
  int64_t failed = 0;
  int64_t output_tokens = 0;
  std::vector<double> first_tokens;  // seconds, of the calls that got one since the last report
};

// Blocks until all calls have ended; calls that are still open after the grace time are cancelled
// and recorded as failed. `on_progress` is called about twice a second from the calling thread;
// when it returns false nothing more is sent and what runs is cancelled.
std::vector<CallRecord> RunLoad(const LoadRunOptions& options,
                                const std::vector<PlannedRequest>& plan,
                                const std::function<bool(const LoadProgress&)>& on_progress);

}  // namespace flashquant
