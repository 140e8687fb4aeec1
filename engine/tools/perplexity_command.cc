// flashquant perplexity: how well a checkpoint predicts a text.
//
// Rule: the text is cut into windows (text_windows.h); in each, tokens are scored given the ones
// before them in it. perplexity = exp(mean of -ln p). The last number printed is the perplexity.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

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
  FQ_ASSIGN_OR_RETURN(const std::vector<TextWindow> windows,
                      CutTextWindows(options.windows, tokens));

  FQ_ASSIGN_OR_RETURN(
      const std::unique_ptr<TextScorer> scorer,
      TextScorer::Create(loaded.model.get(), loaded.backend.get(), options.windows.context));
  const bool shows_progress = isatty(STDERR_FILENO) != 0;
  double sum = 0;
  int64_t num_scored = 0;
  for (size_t window = 0; window < windows.size(); ++window) {
    FQ_ASSIGN_OR_RETURN(
        const double nll,
        scorer->NegativeLogLikelihood(windows[window].tokens, windows[window].first_scored));
    sum += nll;
    num_scored += windows[window].num_scored();
    if (!shows_progress) continue;
    std::fprintf(stderr, "\rwindow %zu of %zu, perplexity %.4f ", window + 1, windows.size(),
                 std::exp(sum / static_cast<double>(num_scored)));
  }
  if (shows_progress) std::fputc('\n', stderr);
  if (!std::isfinite(sum)) {
    return DataLossError("{}: the model gives values that are not finite", options.model);
  }
  fmt::print("tokens {}  windows {}  context {}  stride {}\nperplexity {:.5f}\n", tokens.size(),
             windows.size(), options.windows.context, options.windows.distance(),
             std::exp(sum / static_cast<double>(num_scored)));
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
