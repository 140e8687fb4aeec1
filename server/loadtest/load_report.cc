// Sums and texts; the chart is load_chart.cc's.
#include "server/loadtest/load_report.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace flashquant {
namespace {

nlohmann::ordered_json ToJson(const Percentiles& values) {
  return {{"count", values.count}, {"p50", values.p50}, {"p90", values.p90},
          {"p95", values.p95},     {"p99", values.p99}, {"max", values.max}};
}

nlohmann::ordered_json ToJson(const LoadReport& report) {
  nlohmann::ordered_json json;
  if (report.concurrency > 0) {
    json["concurrency"] = report.concurrency;
  } else {
    json["offered_rate"] = report.offered_rate;
  }
  json["seconds"] = report.seconds;
  json["sent"] = report.sent;
  json["ok"] = report.ok;
  json["errors"] = report.errors;
  json["rate"] = report.Rate();
  json["good"] = report.good;
  json["goodput"] = report.Goodput();
  json["input_tokens"] = report.input_tokens;
  json["output_tokens"] = report.output_tokens;
  json["output_tokens_per_second"] = report.OutputRate();
  json["first_token_seconds"] = ToJson(report.first_token);
  json["gap_seconds"] = ToJson(report.gap);
  json["latency_seconds"] = ToJson(report.latency);
  json["latest_send_seconds"] = report.latest_send;
  return json;
}

std::string PercentileLine(const char* name, const Percentiles& values) {
  constexpr double kMs = 1e3;
  return fmt::format("  {:<12}{:>10.1f}{:>10.1f}{:>10.1f}{:>10.1f}{:>10.1f}\n", name,
                     values.p50 * kMs, values.p90 * kMs, values.p95 * kMs, values.p99 * kMs,
                     values.max * kMs);
}

bool IsGood(const CallRecord& call, const LoadTargets& targets) {
  if (!call.ok) return false;
  const bool in_time =
      targets.first_token_seconds <= 0 ||
      (call.first_token >= 0 && call.FirstTokenLatency() <= targets.first_token_seconds);
  return in_time && (targets.gap_seconds <= 0 || call.MeanGap() <= targets.gap_seconds);
}

}  // namespace

double CallRecord::MeanGap() const {
  if (gaps.empty()) return 0;
  return std::accumulate(gaps.begin(), gaps.end(), 0.0) / static_cast<double>(gaps.size());
}

Percentiles PercentilesOf(std::vector<double> values) {
  Percentiles result;
  if (values.empty()) return result;
  std::ranges::sort(values);
  const auto rank = [&](double share) {
    const double position = std::ceil(share * static_cast<double>(values.size())) - 1;
    return values[static_cast<size_t>(std::max(position, 0.0))];
  };
  result.count = static_cast<int64_t>(values.size());
  result.p50 = rank(0.5);
  result.p90 = rank(0.9);
  result.p95 = rank(0.95);
  result.p99 = rank(0.99);
  result.max = values.back();
  return result;
}

LoadReport MakeReport(const std::vector<CallRecord>& records, double warmup_seconds,
                      const LoadTargets& targets) {
  LoadReport report;
  std::vector<double> first_tokens;
  std::vector<double> gaps;
  std::vector<double> latencies;
  double last_end = warmup_seconds;
  for (const CallRecord& call : records) {
    if (call.intended < warmup_seconds) continue;
    ++report.sent;
    report.latest_send = std::max(report.latest_send, call.sent - call.intended);
    last_end = std::max(last_end, call.ended);
    if (!call.ok) {
      ++report.errors[call.error];
      continue;
    }
    ++report.ok;
    report.good += IsGood(call, targets) ? 1 : 0;
    report.input_tokens += call.input_tokens;
    report.output_tokens += call.output_tokens;
    if (call.first_token >= 0) first_tokens.push_back(call.FirstTokenLatency());
    gaps.insert(gaps.end(), call.gaps.begin(), call.gaps.end());
    latencies.push_back(call.Latency());
  }
  report.seconds = last_end - warmup_seconds;
  report.first_token = PercentilesOf(std::move(first_tokens));
  report.gap = PercentilesOf(std::move(gaps));
  report.latency = PercentilesOf(std::move(latencies));
  return report;
}

std::string ReportText(const LoadReport& report, const LoadTargets& targets) {
  std::string text = report.concurrency > 0
                         ? fmt::format("{} calls at once", report.concurrency)
                         : fmt::format("{:.2f} requests/s offered", report.offered_rate);
  text += fmt::format(": {} sent, {} ok, {} failed in {:.1f} s\n", report.sent, report.ok,
                      report.sent - report.ok, report.seconds);
  text += fmt::format("  {:.2f} requests/s, {:.1f} output tokens/s\n", report.Rate(),
                      report.OutputRate());
  if (targets.first_token_seconds > 0 || targets.gap_seconds > 0) {
    text += fmt::format(
        "  goodput {:.2f} requests/s, {:.1f}% within the targets\n", report.Goodput(),
        report.sent == 0
            ? 0.0
            : 100.0 * static_cast<double>(report.good) / static_cast<double>(report.sent));
  }
  text += fmt::format("  {:<12}{:>10}{:>10}{:>10}{:>10}{:>10}\n", "ms", "p50", "p90", "p95", "p99",
                      "max");
  text += PercentileLine("first token", report.first_token);
  text += PercentileLine("gap", report.gap);
  text += PercentileLine("whole call", report.latency);
  for (const auto& [error, count] : report.errors) text += fmt::format("  {} x {}\n", count, error);
  if (report.latest_send > 0.1) {
    text += fmt::format("  the sender was up to {:.0f} ms late: this machine is the limit\n",
                        report.latest_send * 1e3);
  }
  return text;
}

std::string ReportsJson(const std::vector<LoadReport>& reports, const LoadTargets& targets) {
  nlohmann::ordered_json json;
  json["targets"] = {{"first_token_seconds", targets.first_token_seconds},
                     {"gap_seconds", targets.gap_seconds}};
  json["runs"] = nlohmann::ordered_json::array();
  for (const LoadReport& report : reports) json["runs"].push_back(ToJson(report));
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace flashquant
