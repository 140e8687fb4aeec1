// flashquant perplexity: how well a checkpoint predicts a text.
//
// Rule: the whole file is encoded at once without special tokens and cut into non-overlapping
// windows of `context` tokens from the start (a shorter rest is dropped); in each window tokens 1..
// are scored given the ones before them. perplexity = exp(mean of -ln p). The last number printed
// is the perplexity.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>

#include "engine/checkpoint/file_reader.h"
#include "engine/model/loaded_model.h"
#include "engine/model/text_scorer.h"
#include "engine/tools/commands.h"
#include "engine/tools/run_tool.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

struct PerplexityOptions {
  std::string model;
  std::string text;
  std::string backend = "auto";
  int32_t threads = 0;
  int32_t context = 512;
  int32_t max_windows = 0;
};

absl::Status RunPerplexity(const PerplexityOptions& options) {
  FQ_ASSIGN_OR_RETURN(const std::string text, ReadFile(options.text, kMaxTextBytes));
  FQ_ASSIGN_OR_RETURN(
      const LoadedModel loaded,
      LoadModel(options.model, options.context,
                {.kind = options.backend, .num_threads = options.threads}, nullptr));
  if (loaded.tokenizer == nullptr) {
    return DataLossError("{}: perplexity needs a tokenizer (tokenizer.json is missing)",
                         options.model);
  }
  const std::vector<int32_t> tokens = loaded.tokenizer->Encode(text, SpecialText::kPlain);
  const int64_t context = options.context;
  int64_t num_windows = static_cast<int64_t>(tokens.size()) / context;
  if (num_windows == 0) {
    return InvalidArgumentError("--text: {} has {} tokens, one window needs {}; lower --context",
                                options.text, tokens.size(), context);
  }
  if (options.max_windows > 0) num_windows = std::min<int64_t>(num_windows, options.max_windows);

  FQ_ASSIGN_OR_RETURN(
      const std::unique_ptr<TextScorer> scorer,
      TextScorer::Create(loaded.model.get(), loaded.backend.get(), options.context));
  const bool shows_progress = isatty(STDERR_FILENO) != 0;
  double sum = 0;
  for (int64_t window = 0; window < num_windows; ++window) {
    const auto span = std::span(tokens).subspan(static_cast<size_t>(window * context),
                                                static_cast<size_t>(context));
    FQ_ASSIGN_OR_RETURN(const double nll, scorer->NegativeLogLikelihood(span));
    sum += nll;
    if (!shows_progress) continue;
    const double so_far = std::exp(sum / static_cast<double>((window + 1) * (context - 1)));
    std::fprintf(stderr, "\rwindow %lld of %lld, perplexity %.4f ",
                 static_cast<long long>(window + 1), static_cast<long long>(num_windows), so_far);
  }
  if (shows_progress) std::fputc('\n', stderr);
  if (!std::isfinite(sum)) {
    return DataLossError("{}: the model gives values that are not finite", options.model);
  }
  fmt::print("tokens {}  windows {}  context {}\nperplexity {:.5f}\n", tokens.size(), num_windows,
             context, std::exp(sum / static_cast<double>(num_windows * (context - 1))));
  return absl::OkStatus();
}

}  // namespace

void AddPerplexityCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<PerplexityOptions>();
  CLI::App* command =
      app.add_subcommand("perplexity", "Measure a checkpoint's perplexity on a text");
  command->add_option("--model", options->model, "checkpoint folder")->required();
  command->add_option("--text", options->text, "text file")->required();
  command->add_option("--context", options->context, "tokens per window")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--max-windows", options->max_windows, "score only the first windows, 0 = all")
      ->check(CLI::Range(int32_t{0}, std::numeric_limits<int32_t>::max()))
      ->capture_default_str();
  command->add_option("--backend", options->backend, "auto, cpu or cuda")->capture_default_str();
  command->add_option("--threads", options->threads, "CPU workers, 0 = one per core")
      ->check(CLI::Range(int32_t{0}, std::numeric_limits<int32_t>::max()))
      ->capture_default_str();
  command->callback(
      [options, exit_code] { *exit_code = RunTool([&] { return RunPerplexity(*options); }); });
}

}  // namespace flashquant
