// LoadReport: what came of a load test: percentiles, goodput, errors; as text, JSON and a chart.
//
// Times count from the moment a request was intended to be sent, so a client or server that falls
// behind shows up as latency instead of as fewer samples.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flashquant {

// One call, times in seconds since the start of the run.
struct CallRecord {
  double intended = 0;
  double sent = 0;
  double first_token = -1;  // -1 = none came
  double ended = 0;
  std::vector<float> gaps;  // seconds between consecutive messages with tokens
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  bool ok = false;    // status OK and a last message
  std::string error;  // "RESOURCE_EXHAUSTED QUEUE_FULL"; empty when ok

  double FirstTokenLatency() const { return first_token - intended; }
  double Latency() const { return ended - intended; }
  double MeanGap() const;  // 0 with fewer than two messages
};

struct Percentiles {
  int64_t count = 0;
  double p50 = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
};
// Nearest rank: the smallest value that at least that share of all are not above. Zeros for none.
Percentiles PercentilesOf(std::vector<double> values);

// A call is good when it is OK, its first token came in time and its mean gap is small enough.
// 0 = any.
struct LoadTargets {
  double first_token_seconds = 0;
  double gap_seconds = 0;
};

// One run at one offered load.
struct LoadReport {
  double offered_rate = 0;  // requests a second; 0 in a closed loop
  int concurrency = 0;      // of a closed loop, else 0
  double seconds = 0;       // measured time: from the first intended call to the last end
  int64_t sent = 0;
  int64_t ok = 0;
  int64_t good = 0;
  std::map<std::string, int64_t> errors;
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  Percentiles first_token, gap, latency;  // seconds; of calls that were OK
  double latest_send =
      0;  // how far the sender was behind at worst: its own limit, not the server's

  double Rate() const { return seconds > 0 ? static_cast<double>(ok) / seconds : 0; }
  double Goodput() const { return seconds > 0 ? static_cast<double>(good) / seconds : 0; }
  double OutputRate() const {
    return seconds > 0 ? static_cast<double>(output_tokens) / seconds : 0;
  }
};

// Calls intended before `warmup_seconds` are left out.
LoadReport MakeReport(const std::vector<CallRecord>& records, double warmup_seconds,
                      const LoadTargets& targets);

// Several lines for a person.
std::string ReportText(const LoadReport& report, const LoadTargets& targets);
// {"targets": {...}, "runs": [...]}, times in seconds; ends with a newline.
std::string ReportsJson(const std::vector<LoadReport>& reports, const LoadTargets& targets);
// SVG: p50 and p99 of first token and gap (log scale) against the rate that was offered, or served
// in a closed loop; one point a run.
std::string ReportsSvg(const std::vector<LoadReport>& reports);

}  // namespace flashquant
