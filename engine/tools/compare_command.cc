// flashquant compare: how far checkpoint B is from checkpoint A on a text: perplexities, the
// Kullback-Leibler divergence of B's next-token distributions from A's, and how often both think
// the same token the most likely.
//
// Windows and scored positions are those of flashquant perplexity. Both models see the same
// windows, so the interval of the perplexities' ratio comes from the differences window by window,
// which vary far less than the perplexities do.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/exit_code.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/model/loaded_model.h"
#include "engine/model/text_scorer.h"
#include "engine/tools/commands.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
constexpr int64_t kMaxLogitBytes = int64_t{1} << 32;  // of one window, kept for the comparison

struct CompareOptions {
  std::string model_a;
  std::string model_b;
  std::string text;
  std::string backend = "auto";
  int32_t threads = 0;
  int32_t context = 512;
  int32_t max_windows = 0;
};

struct ComparedWindow {
  double nll_a = 0;  // sums over the scored positions
  double nll_b = 0;
  double divergence = 0;
  int64_t agreements = 0;
};

// In place: logarithms of the softmax, in float around a double sum.
void ToLogProbabilities(std::span<float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
  const double shift = static_cast<double>(max) + std::log(sum);
  for (float& logit : logits) logit = static_cast<float>(static_cast<double>(logit) - shift);
}

size_t MostLikely(std::span<const float> values) {
  return static_cast<size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

absl::StatusOr<ComparedWindow> CompareWindow(TextScorer* scorer_a, TextScorer* scorer_b,
                                             std::span<const int32_t> tokens, size_t vocab_size,
                                             std::vector<float>* kept) {
  const size_t scored = tokens.size() - 1;
  kept->resize(scored * vocab_size);
  FQ_RETURN_IF_ERROR(
      scorer_a->VisitLogits(tokens, [&](int32_t position, std::span<const float> logits) {
        const size_t row = static_cast<size_t>(position);
        if (row >= scored) return;
        const std::span<float> out = std::span<float>(*kept).subspan(row * vocab_size, vocab_size);
        std::copy(logits.begin(), logits.end(), out.begin());
        ToLogProbabilities(out);
      }));
  ComparedWindow window;
  std::vector<float> mine(vocab_size);
  FQ_RETURN_IF_ERROR(
      scorer_b->VisitLogits(tokens, [&](int32_t position, std::span<const float> logits) {
        const size_t row = static_cast<size_t>(position);
        if (row >= scored) return;
        const std::span<const float> theirs =
            std::span<const float>(*kept).subspan(row * vocab_size, vocab_size);
        mine.assign(logits.begin(), logits.end());
        ToLogProbabilities(mine);
        const size_t next = static_cast<size_t>(tokens[row + 1]);
        window.nll_a -= static_cast<double>(theirs[next]);
        window.nll_b -= static_cast<double>(mine[next]);
        for (size_t id = 0; id < vocab_size; ++id) {
          window.divergence += std::exp(static_cast<double>(theirs[id])) *
                               (static_cast<double>(theirs[id]) - static_cast<double>(mine[id]));
        }
        if (MostLikely(theirs) == MostLikely(mine)) ++window.agreements;
      }));
  return window;
}

void PrintComparison(const CompareOptions& options, std::span<const ComparedWindow> windows) {
  const double scored = static_cast<double>(options.context - 1);
  const double count = static_cast<double>(windows.size());
  ComparedWindow sum;
  for (const ComparedWindow& window : windows) {
    sum.nll_a += window.nll_a;
    sum.nll_b += window.nll_b;
    sum.divergence += window.divergence;
    sum.agreements += window.agreements;
  }
  const double positions = count * scored;
  const double mean = (sum.nll_b - sum.nll_a) / positions;
  double variance = 0;
  for (const ComparedWindow& window : windows) {
    const double off = (window.nll_b - window.nll_a) / scored - mean;
    variance += off * off;
  }
  constexpr double kTwoSided95 = 1.96;
  const double half =
      count > 1 ? kTwoSided95 * std::sqrt(variance / (count - 1) / count) : HUGE_VAL;
  fmt::print("A                {}\nB                {}\n", options.model_a, options.model_b);
  fmt::print("windows          {} of {} tokens\n", windows.size(), options.context);
  fmt::print("perplexity A     {:.5f}\n", std::exp(sum.nll_a / positions));
  fmt::print("perplexity B     {:.5f}\n", std::exp(sum.nll_b / positions));
  fmt::print("B over A         {:+.3f}%", 100 * std::expm1(mean));
  if (count > 1) {
    fmt::print("  (95% interval {:+.3f}% to {:+.3f}%)", 100 * std::expm1(mean - half),
               100 * std::expm1(mean + half));
  }
  fmt::print("\nKL divergence    {:.6f} nats a token\n", std::max(sum.divergence, 0.0) / positions);
  fmt::print("top-1 agreement  {:.3f}%\n", 100 * static_cast<double>(sum.agreements) / positions);
}

absl::StatusOr<LoadedModel> LoadFor(const CompareOptions& options, const std::string& path) {
  FQ_ASSIGN_OR_RETURN(
      LoadedModel loaded,
      LoadModel(path, options.context, {.kind = options.backend, .num_threads = options.threads},
                nullptr));
  if (loaded.tokenizer == nullptr) {
    return DataLossError("{}: compare needs a tokenizer (tokenizer.json is missing)", path);
  }
  return loaded;
}

absl::Status RunCompare(const CompareOptions& options) {
  FQ_ASSIGN_OR_RETURN(const std::string text, ReadFile(options.text, kMaxTextBytes));
  FQ_ASSIGN_OR_RETURN(const LoadedModel a, LoadFor(options, options.model_a));
  FQ_ASSIGN_OR_RETURN(const LoadedModel b, LoadFor(options, options.model_b));
  const std::vector<int32_t> tokens = a.tokenizer->Encode(text, SpecialText::kPlain);
  if (a.config.vocab_size != b.config.vocab_size ||
      tokens != b.tokenizer->Encode(text, SpecialText::kPlain)) {
    return InvalidArgumentError("{} and {}: different vocabularies or tokenizers", options.model_a,
                                options.model_b);
  }
  const int64_t context = options.context;
  int64_t num_windows = static_cast<int64_t>(tokens.size()) / context;
  if (num_windows == 0) {
    return InvalidArgumentError("--text: {} has {} tokens, one window needs {}; lower --context",
                                options.text, tokens.size(), context);
  }
  if (options.max_windows > 0) num_windows = std::min<int64_t>(num_windows, options.max_windows);
  const int64_t vocab_size = a.config.vocab_size;
  if (context * vocab_size > kMaxLogitBytes / static_cast<int64_t>(sizeof(float))) {
    return InvalidArgumentError("--context: logits of {} tokens are above {} MiB", context,
                                kMaxLogitBytes >> 20);
  }
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<TextScorer> scorer_a,
                      TextScorer::Create(a.model.get(), a.backend.get(), options.context));
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<TextScorer> scorer_b,
                      TextScorer::Create(b.model.get(), b.backend.get(), options.context));
  std::vector<ComparedWindow> windows;
  std::vector<float> kept;
  for (int64_t window = 0; window < num_windows; ++window) {
    const auto part = std::span(tokens).subspan(static_cast<size_t>(window * context),
                                                static_cast<size_t>(context));
    FQ_ASSIGN_OR_RETURN(const ComparedWindow compared,
                        CompareWindow(scorer_a.get(), scorer_b.get(), part,
                                      static_cast<size_t>(vocab_size), &kept));
    if (!std::isfinite(compared.nll_a) || !std::isfinite(compared.nll_b)) {
      return DataLossError("{}: the model gives values that are not finite",
                           std::isfinite(compared.nll_a) ? options.model_b : options.model_a);
    }
    windows.push_back(compared);
  }
  PrintComparison(options, windows);
  return absl::OkStatus();
}

}  // namespace

void AddCompareCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App* command = app.add_subcommand(
      "compare", "Perplexity, divergence and agreement of two checkpoints on a text");
  command->add_option("A", options->model_a, "checkpoint folder to compare with")->required();
  command->add_option("B", options->model_b, "checkpoint folder to be judged")->required();
  command->add_option("--text", options->text, "text file")->required();
  command->add_option("--context", options->context, "tokens per window")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--max-windows", options->max_windows, "score only the first windows, 0 = all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--backend", options->backend, "auto, cpu or cuda")->capture_default_str();
  command->add_option("--threads", options->threads, "CPU workers, 0 = one per core")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->callback([options, exit_code] { *exit_code = ReportStatus(RunCompare(*options)); });
}

}  // namespace flashquant
