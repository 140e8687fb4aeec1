// flashquant compare: how far checkpoint B is from checkpoint A on a text: perplexities, the
// Kullback-Leibler divergence of B's next-token distributions from A's, and how often both think
// the same token the most likely.
//
// Windows and scored positions are those of flashquant perplexity. Both models see the same
// windows, so the interval of the perplexities' ratio comes from the differences window by window,
// which vary far less than the perplexities do. Windows that overlap score different tokens.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/loaded_model.h"
#include "engine/model/text_scorer.h"
#include "engine/quantize/parallel_for.h"
#include "engine/tools/backend_flags.h"
#include "engine/tools/commands.h"
#include "engine/tools/imported_model.h"
#include "engine/tools/run_tool.h"
#include "engine/tools/text_windows.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxLogitBytes = int64_t{1} << 32;  // of one window by one model; two are kept
constexpr int64_t kRowsPerTask = 8;

struct CompareOptions {
  std::string reference;
  std::vector<std::string> models;
  TextWindowFlags windows;
  BackendFlags backend;
};

// Sums over some scored positions.
struct ComparedWindow {
  double nll_a = 0;
  double nll_b = 0;
  double divergence = 0;
  int64_t agreements = 0;
  int64_t positions = 0;
};

ComparedWindow Sum(const ComparedWindow& a, const ComparedWindow& b) {
  return {a.nll_a + b.nll_a, a.nll_b + b.nll_b, a.divergence + b.divergence,
          a.agreements + b.agreements, a.positions + b.positions};
}

struct ComparedModel {
  LoadedModel loaded;
  std::unique_ptr<TextScorer> scorer;
  std::vector<ComparedWindow> windows;
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

// One window's log probabilities [scored positions, V] by `model`, rows in parallel.
absl::Status LogProbabilities(const TextWindow& window, int num_threads, ComparedModel* model,
                              std::vector<float>* values) {
  const size_t vocab_size = static_cast<size_t>(model->loaded.config.vocab_size);
  const int64_t scored = window.num_scored();
  values->resize(static_cast<size_t>(scored) * vocab_size);
  FQ_RETURN_IF_ERROR(model->scorer->VisitLogits(
      window.tokens, [&](int32_t position, std::span<const float> logits) {
        const int64_t row = position + 1 - window.first_scored;
        if (row < 0 || row >= scored) return;
        std::copy(logits.begin(), logits.end(),
                  values->begin() + row * static_cast<int64_t>(vocab_size));
      }));
  ParallelFor(num_threads, scored, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      ToLogProbabilities(
          std::span(*values).subspan(static_cast<size_t>(row) * vocab_size, vocab_size));
    }
  });
  return absl::OkStatus();
}

ComparedWindow CompareRow(std::span<const float> theirs, std::span<const float> mine, size_t next) {
  ComparedWindow row;
  row.nll_a = -static_cast<double>(theirs[next]);
  row.nll_b = -static_cast<double>(mine[next]);
  for (size_t id = 0; id < theirs.size(); ++id) {
    row.divergence += std::exp(static_cast<double>(theirs[id])) *
                      (static_cast<double>(theirs[id]) - static_cast<double>(mine[id]));
  }
  row.agreements = MostLikely(theirs) == MostLikely(mine) ? 1 : 0;
  row.positions = 1;
  return row;
}

// Rows are compared in parallel and added up in order: the same sums for any number of threads.
absl::Status ScoreModel(std::span<const float> theirs, const TextWindow& window, int num_threads,
                        std::vector<float>* mine, ComparedModel* model) {
  const size_t vocab_size = static_cast<size_t>(model->loaded.config.vocab_size);
  FQ_RETURN_IF_ERROR(LogProbabilities(window, num_threads, model, mine));
  std::vector<ComparedWindow> rows(static_cast<size_t>(window.num_scored()));
  const auto next = window.tokens.subspan(static_cast<size_t>(window.first_scored));
  ParallelFor(num_threads, window.num_scored(), kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (size_t row = static_cast<size_t>(begin); row < static_cast<size_t>(end); ++row) {
      rows[row] = CompareRow(theirs.subspan(row * vocab_size, vocab_size),
                             std::span(*mine).subspan(row * vocab_size, vocab_size),
                             static_cast<size_t>(next[row]));
    }
  });
  const ComparedWindow sum = std::accumulate(rows.begin(), rows.end(), ComparedWindow{}, Sum);
  if (!std::isfinite(sum.nll_a) || !std::isfinite(sum.nll_b)) {
    return DataLossError(
        "{}: the model or the one it is compared with gives values that are not "
        "finite",
        model->loaded.path);
  }
  model->windows.push_back(sum);
  return absl::OkStatus();
}

ComparedWindow Total(const ComparedModel& model) {
  return std::accumulate(model.windows.begin(), model.windows.end(), ComparedWindow{}, Sum);
}

// One line of the table.
void PrintModel(const ComparedModel& model) {
  const double count = static_cast<double>(model.windows.size());
  const ComparedWindow sum = Total(model);
  const double positions = static_cast<double>(sum.positions);
  const double mean = (sum.nll_b - sum.nll_a) / positions;
  double variance = 0;  // of the mean, times count - 1
  for (const ComparedWindow& window : model.windows) {
    const double off = window.nll_b - window.nll_a - mean * static_cast<double>(window.positions);
    variance += count * off * off / (positions * positions);
  }
  std::string interval = "-";
  if (count > 1) {
    constexpr double kTwoSided95 = 1.96;
    const double half = kTwoSided95 * std::sqrt(variance / (count - 1));
    interval = fmt::format("{:+.3f}% .. {:+.3f}%", 100 * std::expm1(mean - half),
                           100 * std::expm1(mean + half));
  }
  fmt::print("{:>10.5f}  {:>+8.3f}%  {:>22}  {:>9.6f}  {:>7.3f}%  {}\n",
             std::exp(sum.nll_b / positions), 100 * std::expm1(mean), interval,
             std::max(sum.divergence, 0.0) / positions,
             100 * static_cast<double>(sum.agreements) / positions, model.loaded.path);
}

void PrintTable(const CompareOptions& options, std::span<const ComparedModel> models) {
  const ComparedWindow sum = Total(models.front());
  fmt::print("{} windows of {} tokens, {} apart\n", models.front().windows.size(),
             options.windows.context, options.windows.distance());
  fmt::print("{:>10}  {:>9}  {:>22}  {:>9}  {:>8}\n", "perplexity", "over A", "95% interval",
             "KL, nats", "top-1");
  fmt::print("{:>10.5f}  {:>9}  {:>22}  {:>9}  {:>8}  {}\n",
             std::exp(sum.nll_a / static_cast<double>(sum.positions)), "-", "-", "-", "-",
             options.reference);
  for (const ComparedModel& model : models) PrintModel(model);
}

absl::StatusOr<ComparedModel> LoadFor(const CompareOptions& options, const std::string& path) {
  ComparedModel model;
  absl::StatusOr<LoadedModel> loaded =
      LoadAnyModel(path, options.windows.context, options.backend.options());
  if (loaded.status().code() == absl::StatusCode::kFailedPrecondition) {
    return Annotate(loaded.status(), path);  // of two models, which one has the shorter context
  }
  FQ_RETURN_IF_ERROR(loaded.status());
  model.loaded = *std::move(loaded);
  if (model.loaded.tokenizer == nullptr) {
    return DataLossError(
        "{}: compare needs a tokenizer (no tokenizer.json, vocab.json with "
        "merges.txt, or tokenizer.model)",
        path);
  }
  FQ_ASSIGN_OR_RETURN(model.scorer,
                      TextScorer::Create(model.loaded.model.get(), model.loaded.backend.get(),
                                         options.windows.context));
  return model;
}

absl::Status RunCompare(const CompareOptions& options) {
  FQ_ASSIGN_OR_RETURN(const std::string text, ReadWindowedText(options.windows));
  FQ_ASSIGN_OR_RETURN(ComparedModel reference, LoadFor(options, options.reference));
  const std::vector<int32_t> tokens = reference.loaded.tokenizer->Encode(text, SpecialText::kPlain);
  const int64_t vocab_size = reference.loaded.config.vocab_size;
  std::vector<ComparedModel> models;
  for (const std::string& path : options.models) {
    FQ_ASSIGN_OR_RETURN(ComparedModel model, LoadFor(options, path));
    if (model.loaded.config.vocab_size != vocab_size ||
        tokens != model.loaded.tokenizer->Encode(text, SpecialText::kPlain)) {
      return InvalidArgumentError("{} and {}: different vocabularies or tokenizers",
                                  options.reference, path);
    }
    models.push_back(std::move(model));
  }
  const int64_t context = options.windows.context;
  FQ_ASSIGN_OR_RETURN(const std::vector<TextWindow> windows,
                      CutTextWindows(options.windows, tokens));
  if (context * vocab_size > kMaxLogitBytes / static_cast<int64_t>(sizeof(float))) {
    return InvalidArgumentError("--context: logits of {} tokens are above {} MiB", context,
                                kMaxLogitBytes >> 20);
  }
  const int num_threads =
      options.backend.threads > 0 ? options.backend.threads : AvailableThreads();
  std::vector<float> theirs;
  std::vector<float> mine;
  for (const TextWindow& window : windows) {
    FQ_RETURN_IF_ERROR(LogProbabilities(window, num_threads, &reference, &theirs));
    for (ComparedModel& model : models) {
      FQ_RETURN_IF_ERROR(ScoreModel(theirs, window, num_threads, &mine, &model));
    }
  }
  PrintTable(options, models);
  return absl::OkStatus();
}

}  // namespace

void AddCompareCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App* command = app.add_subcommand(
      "compare", "Perplexity, divergence and agreement of checkpoints with another on a text");
  command
      ->add_option("A", options->reference,
                   "checkpoint (folder, GPTQ folder or GGUF file) to compare with")
      ->required();
  command->add_option("B", options->models, "checkpoints to be judged")
      ->required()
      ->expected(1, 64);
  AddTextWindowFlags(command, &options->windows);
  AddBackendFlags(command, &options->backend);
  command->callback(
      [options, exit_code] { *exit_code = RunTool([&] { return RunCompare(*options); }); });
}

}  // namespace flashquant
