// flashquant loadtest: measures a running server under a trace, a rate or a number of calls at
// once.
//
// The progress line and the text go to stderr, so that --json - can be piped.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>

#include "engine/base/exit_code.h"
#include "fmt/format.h"
#include "kernels/base/status_macros.h"
#include "server/client_flags.h"
#include "server/commands.h"
#include "server/loadtest/load_plan.h"
#include "server/loadtest/load_report.h"
#include "server/loadtest/load_runner.h"
#include "server/status_mapping.h"

namespace flashquant {
namespace {

struct LoadtestFlags {
  ClientFlags client;
  std::string trace;
  std::string prompts;
  std::vector<double> rates;
  std::vector<int> concurrencies;
  LoadPlanOptions plan;
  LoadRunOptions run;
  double warmup_seconds = 0;
  double target_first_token_ms = 0;
  double target_gap_ms = 0;
  std::string json;
  std::string svg;
};

volatile std::sig_atomic_t interrupted = 0;
void OnInterrupt(int) { interrupted = 1; }

absl::StatusOr<std::string> ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFoundError("{}: cannot open", path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return NotFoundError("{}: cannot read", path);
  return text;
}

absl::Status WriteAll(const std::string& path, const std::string& text) {
  std::FILE* file = path == "-" ? stdout : std::fopen(path.c_str(), "wb");
  if (file == nullptr) return ResourceExhaustedError("{}: cannot open for writing", path);
  bool ok = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  ok = (file == stdout ? std::fflush(file) : std::fclose(file)) == 0 && ok;
  return ok ? absl::OkStatus() : ResourceExhaustedError("{}: cannot write all of it", path);
}

// A line that is written over while a person watches, else a new one every 10 s.
class ProgressLine {
 public:
  explicit ProgressLine(double duration) : duration_(duration) {}

  bool Show(LoadProgress progress) {
    recent_.insert(recent_.end(), progress.first_tokens.begin(), progress.first_tokens.end());
    if (!terminal_ && progress.seconds < next_) return interrupted == 0;
    next_ = progress.seconds + 10;
    const double elapsed = progress.seconds - last_.seconds;
    const auto tokens = static_cast<double>(progress.output_tokens - last_.output_tokens);
    const Percentiles first = PercentilesOf(std::exchange(recent_, {}));
    fmt::print(
        stderr,
        "{}{:.0f} of {:.0f} s  sent {}  in flight {}  failed {}  {:.0f} tokens/s  first token "
        "p50 {:.0f} p99 {:.0f} ms{}",
        terminal_ ? "\r" : "", progress.seconds, duration_, progress.sent,
        progress.sent - progress.ended, progress.failed, elapsed > 0 ? tokens / elapsed : 0.0,
        first.p50 * 1e3, first.p99 * 1e3, terminal_ ? "\x1b[K" : "\n");
    std::fflush(stderr);
    last_ = std::move(progress);
    return interrupted == 0;
  }
  void End() const {
    if (terminal_) fmt::print(stderr, "\r\x1b[K");
  }

 private:
  const double duration_;
  const bool terminal_ = isatty(STDERR_FILENO) == 1;
  LoadProgress last_;
  std::vector<double> recent_;
  double next_ = 10;
};

absl::Status ReadModel(const LoadtestFlags& flags, const ClientSecurity& security,
                       LoadPlanOptions* plan) {
  InferenceClient client(flags.client.target, security);
  CallOptions options;
  options.timeout = std::chrono::seconds(10);
  v1::GetModelResponse model;
  const CallResult result = client.GetModel({}, &model, options);
  if (!result.ok()) {
    return UnavailableError("{}: {}: {}", flags.client.target, StatusCodeName(result.code),
                            result.message);
  }
  plan->context_tokens = model.limits().context_tokens();
  plan->vocabulary_size = model.vocabulary_size();
  fmt::print(stderr, "{}: model {}, {}, {} backend, context {}\n", flags.client.target,
             model.model(), model.quantization(), model.backend(), plan->context_tokens);
  return absl::OkStatus();
}

struct Inputs {
  std::vector<TraceEntry> trace;
  std::vector<std::string> prompts;
};

absl::StatusOr<Inputs> ReadInputs(const LoadtestFlags& flags, uint32_t context_tokens) {
  Inputs inputs;
  if (!flags.trace.empty()) {
    FQ_ASSIGN_OR_RETURN(const std::string text, ReadAll(flags.trace));
    auto trace = ParseTrace(text);
    FQ_RETURN_IF_ERROR(Annotate(trace.status(), flags.trace));
    inputs.trace = *std::move(trace);
    const double scale = LengthScale(inputs.trace, context_tokens);
    if (scale < 1) {
      fmt::print(stderr, "{}: lengths times {:.4f}, so that the longest request fits\n",
                 flags.trace, scale);
    }
  }
  if (!flags.prompts.empty()) {
    FQ_ASSIGN_OR_RETURN(const std::string text, ReadAll(flags.prompts));
    auto prompts = ParsePrompts(text);
    FQ_RETURN_IF_ERROR(Annotate(prompts.status(), flags.prompts));
    inputs.prompts = *std::move(prompts);
  }
  return inputs;
}

LoadTargets TargetsOf(const LoadtestFlags& flags) {
  return {flags.target_first_token_ms * 1e-3, flags.target_gap_ms * 1e-3};
}

// One run: at `rate`, or with `concurrency` calls at once.
absl::StatusOr<LoadReport> RunOnce(const LoadtestFlags& flags, const Inputs& inputs,
                                   LoadPlanOptions plan_options, LoadRunOptions run, double rate,
                                   int concurrency) {
  plan_options.rate = rate;
  plan_options.closed_loop = concurrency > 0;
  run.concurrency = concurrency;
  run.duration_seconds = plan_options.duration_seconds;
  FQ_ASSIGN_OR_RETURN(const std::vector<PlannedRequest> plan,
                      MakeLoadPlan(plan_options, inputs.trace, inputs.prompts));
  ProgressLine line(plan_options.duration_seconds);
  const auto records =
      RunLoad(run, plan, [&](const LoadProgress& progress) { return line.Show(progress); });
  line.End();
  LoadReport report = MakeReport(records, flags.warmup_seconds, TargetsOf(flags));
  report.concurrency = concurrency;
  if (concurrency == 0) {
    report.offered_rate =
        rate > 0 ? rate : static_cast<double>(plan.size()) / plan_options.duration_seconds;
  }
  fmt::print(stderr, "{}", ReportText(report, TargetsOf(flags)));
  return report;
}

absl::StatusOr<int> Loadtest(const LoadtestFlags& flags) {
  if (flags.warmup_seconds >= flags.plan.duration_seconds) {
    return InvalidArgumentError("--warmup: must be less than --duration");
  }
  LoadPlanOptions plan = flags.plan;
  LoadRunOptions run = flags.run;
  run.target = flags.client.target;
  FQ_ASSIGN_OR_RETURN(run.security, LoadClientSecurity(flags.client));
  FQ_RETURN_IF_ERROR(ReadModel(flags, run.security, &plan));
  FQ_ASSIGN_OR_RETURN(const Inputs inputs, ReadInputs(flags, plan.context_tokens));

  std::signal(SIGINT, OnInterrupt);
  std::vector<LoadReport> reports;
  int64_t ok = 0;
  const auto run_once = [&](double rate, int concurrency) -> absl::Status {
    if (interrupted != 0) return absl::OkStatus();
    FQ_ASSIGN_OR_RETURN(LoadReport report, RunOnce(flags, inputs, plan, run, rate, concurrency));
    ok += report.ok;
    reports.push_back(std::move(report));
    ++plan.seed;  // the server may have kept what it computed for these prompts
    return absl::OkStatus();
  };
  if (flags.rates.empty() && flags.concurrencies.empty()) FQ_RETURN_IF_ERROR(run_once(0, 0));
  for (const double rate : flags.rates) FQ_RETURN_IF_ERROR(run_once(rate, 0));
  for (const int concurrency : flags.concurrencies) FQ_RETURN_IF_ERROR(run_once(0, concurrency));
  if (!flags.json.empty()) {
    FQ_RETURN_IF_ERROR(WriteAll(flags.json, ReportsJson(reports, TargetsOf(flags))));
  }
  if (!flags.svg.empty()) FQ_RETURN_IF_ERROR(WriteAll(flags.svg, ReportsSvg(reports)));
  return ok > 0 ? 0 : kExitUnavailable;
}

int RunLoadtest(const LoadtestFlags& flags) {
  const absl::StatusOr<int> code = Loadtest(flags);
  return code.ok() ? *code : ReportStatus(code.status());
}

void AddLoadFlags(LoadtestFlags* flags, CLI::App* command) {
  auto* load = command->add_option_group("load");
  auto* trace =
      load->add_option("--trace", flags->trace,
                       "CSV of time,input tokens,output tokens; lengths are scaled to the "
                       "model's context");
  load->add_option("--rate", flags->rates,
                   "requests a second, Poisson or the trace stretched to it; several: one run each")
      ->delimiter(',')
      ->check(CLI::Range(0.001, 1e6));
  auto* concurrency =
      load->add_option("--concurrency", flags->concurrencies,
                       "calls at once, the next when one ends; several: one run each")
          ->delimiter(',')
          ->check(CLI::Range(1, 100000));
  load->require_option(1, 0);
  concurrency->excludes("--rate");
  command->add_flag("--uniform", flags->plan.uniform_arrivals, "even spacing instead of Poisson")
      ->excludes(trace);
}

}  // namespace

void AddLoadtestCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<LoadtestFlags>();
  CLI::App* command =
      app.add_subcommand("loadtest", "Measure a running server: latencies, throughput, goodput");
  AddClientFlags(&flags->client, command);
  AddLoadFlags(flags.get(), command);
  command->add_option("--prompts", flags->prompts,
                      "JSON Lines with a prompt each; unset = made-up token ids");
  command->add_option("--duration", flags->plan.duration_seconds, "seconds of a run")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  command->add_option("--warmup", flags->warmup_seconds, "its first seconds that do not count")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  command->add_option("--grace", flags->run.grace_seconds, "seconds for what is open at the end")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command->add_option("--input-tokens", flags->plan.input_tokens, "length of made-up prompts")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--output-tokens", flags->plan.output_tokens, "tokens of an answer")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--temperature", flags->run.temperature, "0 = greedy")
      ->check(CLI::Range(0.0, 2.0))
      ->capture_default_str();
  command->add_option("--connections", flags->run.connections, "calls go to them in turn")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command
      ->add_option(
          "--seed", flags->plan.seed,
          "of arrival times and made-up prompts; the next run takes the next one. With one "
          "that it has had before, a server finds prompts in its prefix cache")
      ->capture_default_str();
  command
      ->add_option("--target-first-token-ms", flags->target_first_token_ms,
                   "goodput counts calls whose first token comes within it; 0 = any")
      ->check(CLI::Range(0.0, 1e7));
  command
      ->add_option("--target-gap-ms", flags->target_gap_ms,
                   "and whose mean gap between tokens is at most this; 0 = any")
      ->check(CLI::Range(0.0, 1e7));
  command->add_option("--json", flags->json, "write the figures here, - = stdout");
  command->add_option("--svg", flags->svg, "write a chart of latency over rate here");
  command->callback([flags, exit_code] { *exit_code = RunLoadtest(*flags); });
}

}  // namespace flashquant
