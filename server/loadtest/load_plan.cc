// Readers of the two file forms, and the drawing of times and prompts.
#include "server/loadtest/load_plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <random>

#include "kernels/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace flashquant {
namespace {

constexpr size_t kMaxRequests = 10'000'000;
constexpr size_t kClosedLoopRequests = 4096;
constexpr int64_t kMaxTokens = 100'000'000;

// Takes the text up to the next `end` off the front of `text`.
std::string_view TakeUntil(std::string_view* text, char end) {
  const size_t at = text->find(end);
  std::string_view taken = text->substr(0, at);
  text->remove_prefix(at == std::string_view::npos ? text->size() : at + 1);
  if (!taken.empty() && taken.back() == '\r') taken.remove_suffix(1);
  return taken;
}

template <typename T>
std::optional<T> ParseNumber(std::string_view text) {
  T value{};
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

// Days since 1970-01-01 in the Gregorian calendar, by counting years from March on.
int64_t DaysOf(int64_t year, int64_t month, int64_t day) {
  if (month <= 2) {
    --year;
    month += 12;
  }
  const int64_t leap_days = year / 4 - year / 100 + year / 400;
  return 365 * year + leap_days + (153 * (month - 3) + 2) / 5 + day - 719469;
}

// "2023-11-16 18:17:03.97" or plain seconds.
std::optional<double> ParseTime(std::string_view text) {
  if (const auto seconds = ParseNumber<double>(text)) {
    return std::isfinite(*seconds) ? seconds : std::nullopt;
  }
  const auto year = ParseNumber<int64_t>(TakeUntil(&text, '-'));
  const auto month = ParseNumber<int64_t>(TakeUntil(&text, '-'));
  const auto day = ParseNumber<int64_t>(TakeUntil(&text, ' '));
  const auto hour = ParseNumber<int64_t>(TakeUntil(&text, ':'));
  const auto minute = ParseNumber<int64_t>(TakeUntil(&text, ':'));
  const auto second = ParseNumber<double>(text);
  if (!year || !month || !day || !hour || !minute || !second) return std::nullopt;
  const bool in_range = *year >= 1970 && *year <= 9999 && *month >= 1 && *month <= 12 &&
                        *day >= 1 && *day <= 31 && *hour >= 0 && *hour <= 23 && *minute >= 0 &&
                        *minute <= 59 && *second >= 0 && *second < 61;
  if (!in_range) return std::nullopt;
  const int64_t minutes = (DaysOf(*year, *month, *day) * 24 + *hour) * 60 + *minute;
  return static_cast<double>(minutes) * 60 + *second;
}

std::optional<TraceEntry> ParseTraceLine(std::string_view line) {
  const auto seconds = ParseTime(TakeUntil(&line, ','));
  const auto input = ParseNumber<int64_t>(TakeUntil(&line, ','));
  const auto output = ParseNumber<int64_t>(line);
  if (!seconds || !input || !output) return std::nullopt;
  if (*input < 0 || *input > kMaxTokens || *output < 0 || *output > kMaxTokens) return std::nullopt;
  return TraceEntry{*seconds, *input, *output};
}

std::optional<std::string> PromptOf(const nlohmann::json& line) {
  if (!line.is_object()) return std::nullopt;
  for (const char* key : {"prompt", "text", "question"}) {
    const auto found = line.find(key);
    if (found != line.end() && found->is_string()) return found->get<std::string>();
  }
  const auto turns = line.find("turns");
  if (turns == line.end() || !turns->is_array() || turns->empty()) return std::nullopt;
  if (!turns->front().is_string()) return std::nullopt;
  return turns->front().get<std::string>();
}

// Times of an open loop without a trace.
std::vector<double> DrawTimes(const LoadPlanOptions& options, std::mt19937_64* random) {
  std::exponential_distribution<double> gap(options.rate);
  std::vector<double> times;
  for (double at = options.uniform_arrivals ? 0 : gap(*random);
       at < options.duration_seconds && times.size() <= kMaxRequests;) {
    times.push_back(at);
    at = options.uniform_arrivals ? static_cast<double>(times.size()) / options.rate
                                  : at + gap(*random);
  }
  return times;
}

// Times of a trace, stretched to the asked rate and repeated.
std::vector<double> StretchTimes(const LoadPlanOptions& options,
                                 const std::vector<TraceEntry>& trace) {
  const auto count = static_cast<double>(trace.size());
  const double span = trace.back().seconds - trace.front().seconds;
  // One mean gap between the last request and the first one of the next round.
  double round = trace.size() > 1 ? span * count / (count - 1) : 1;
  double stretch = 1;
  if (options.rate > 0 && round > 0) stretch = count / (options.rate * round);
  if (round <= 0) round = options.rate > 0 ? count / options.rate : 1;
  std::vector<double> times;
  for (size_t i = 0; times.size() <= kMaxRequests; ++i) {
    const double in_round = trace[i % trace.size()].seconds - trace.front().seconds;
    const double at = (in_round + static_cast<double>(i / trace.size()) * round) * stretch;
    if (at >= options.duration_seconds) break;
    times.push_back(at);
  }
  return times;
}

absl::Status CheckRoom(const LoadPlanOptions& options, int64_t input, int64_t output) {
  if (input >= 1 && output >= 1 && input + output <= static_cast<int64_t>(options.context_tokens)) {
    return absl::OkStatus();
  }
  return InvalidArgumentError(
      "--input-tokens, --output-tokens: need at least 1 each and together at most the model's "
      "context (limit {}, got {} + {})",
      options.context_tokens, input, output);
}

}  // namespace

absl::StatusOr<std::vector<TraceEntry>> ParseTrace(std::string_view csv) {
  std::vector<TraceEntry> trace;
  TakeUntil(&csv, '\n');
  for (size_t line = 2; !csv.empty(); ++line) {
    const std::string_view text = TakeUntil(&csv, '\n');
    if (text.empty()) continue;
    const auto entry = ParseTraceLine(text);
    if (!entry) {
      return DataLossError("line {}: must be time,input tokens,output tokens, got '{}'", line,
                           text.substr(0, 64));
    }
    if (trace.size() == kMaxRequests) {
      return DataLossError("line {}: too many requests (limit {})", line, kMaxRequests);
    }
    trace.push_back(*entry);
  }
  if (trace.empty()) return DataLossError("no requests after the header line");
  std::ranges::stable_sort(trace, {}, &TraceEntry::seconds);
  return trace;
}

absl::StatusOr<std::vector<std::string>> ParsePrompts(std::string_view lines) {
  std::vector<std::string> prompts;
  for (size_t number = 1; !lines.empty(); ++number) {
    const std::string_view text = TakeUntil(&lines, '\n');
    if (text.empty()) continue;
    const auto line = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
    auto prompt = line.is_discarded() ? std::nullopt : PromptOf(line);
    if (!prompt || prompt->empty()) {
      return DataLossError(
          "line {}: must be a JSON object with a text under prompt, text, question or turns",
          number);
    }
    prompts.push_back(*std::move(prompt));
  }
  if (prompts.empty()) return DataLossError("no prompts");
  return prompts;
}

double LengthScale(const std::vector<TraceEntry>& trace, uint32_t context_tokens) {
  int64_t longest = 1;
  for (const TraceEntry& entry : trace) {
    longest = std::max(longest, entry.input_tokens + entry.output_tokens);
  }
  return std::min(1.0, static_cast<double>(context_tokens) / static_cast<double>(longest));
}

absl::StatusOr<std::vector<PlannedRequest>> MakeLoadPlan(const LoadPlanOptions& options,
                                                         const std::vector<TraceEntry>& trace,
                                                         const std::vector<std::string>& prompts) {
  std::mt19937_64 random(options.seed);
  std::vector<double> times(kClosedLoopRequests, 0.0);
  if (!options.closed_loop) {
    times = trace.empty() ? DrawTimes(options, &random) : StretchTimes(options, trace);
  }
  if (times.size() > kMaxRequests) {
    return InvalidArgumentError("--rate, --duration: more than {} requests", kMaxRequests);
  }
  const double scale = LengthScale(trace, options.context_tokens);
  const auto scaled = [scale](int64_t length) {
    return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(length) * scale));
  };
  std::uniform_int_distribution<uint32_t> any_id(0, std::max(options.vocabulary_size, 1u) - 1);
  std::vector<PlannedRequest> plan(times.size());
  for (size_t i = 0; i < plan.size(); ++i) {
    PlannedRequest& request = plan[i];
    int64_t input = options.input_tokens;
    int64_t output = options.output_tokens;
    if (!trace.empty()) {
      input = scaled(trace[i % trace.size()].input_tokens);
      output = scaled(trace[i % trace.size()].output_tokens);
      // Two lengths raised to 1 may exceed the smallest contexts.
      input = std::min<int64_t>(input, std::max<int64_t>(options.context_tokens, 2) - output);
    }
    FQ_RETURN_IF_ERROR(CheckRoom(options, prompts.empty() ? input : 1, output));
    request.seconds = times[i];
    request.max_output_tokens = static_cast<uint32_t>(output);
    if (!prompts.empty()) {
      request.text = prompts[i % prompts.size()];
      continue;
    }
    for (int64_t token = 0; token < input; ++token) request.token_ids.push_back(any_id(random));
  }
  return plan;
}

}  // namespace flashquant
