// flashquant perplexity: how well a checkpoint predicts a text.
//
// Rule: the text is cut into windows (text_windows.h); in each, tokens 1.. are scored given the
// ones before them. perplexity = exp(mean of -ln p). The last number printed is the perplexity.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "engine/model/loaded_model.h"
#include "engine/model/text_scorer.h"
#include "engine/tools/backend_flags.h"
#include "engine/tools/commands.h"
#include "engine/tools/imported_model.h"
#include "engine/tools/run_tool.h"
#include "engine/tools/text_windows.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

struct PerplexityOptions {
  std::string model;
  TextWindowFlags windows;
  BackendFlags backend;
};

absl::Status RunPerplexity(const PerplexityOptions& options) {
  FQ_ASSIGN_OR_RETURN(const std::string text, ReadWindowedText(options.windows));
  FQ_ASSIGN_OR_RETURN(const LoadedModel loaded, LoadAnyModel(options.model, options.windows.context,
                                                             options.backend.options()));
  if (loaded.tokenizer == nullptr) {
    return DataLossError(
        "{}: perplexity needs a tokenizer (no tokenizer.json, vocab.json with "
        "merges.txt, or tokenizer.model)",
        options.model);
  }
  const std::vector<int32_t> tokens = loaded.tokenizer->Encode(text, SpecialText::kPlain);
  const int64_t context = options.windows.context;
  FQ_ASSIGN_OR_RETURN(const int64_t num_windows, NumTextWindows(options.windows, tokens.size()));

  FQ_ASSIGN_OR_RETURN(
      const std::unique_ptr<TextScorer> scorer,
      TextScorer::Create(loaded.model.get(), loaded.backend.get(), options.windows.context));
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
  command->add_option("--model", options->model, "checkpoint folder, GPTQ folder or GGUF file")
      ->required();
  AddTextWindowFlags(command, &options->windows);
  AddBackendFlags(command, &options->backend);
  command->callback(
      [options, exit_code] { *exit_code = RunTool([&] { return RunPerplexity(*options); }); });
}

}  // namespace flashquant
