// flashquant complete: one prompt, answered in this process: the shortest way from a checkpoint to
// text.
//
// The same engine as the server's, without gRPC. With --json the last thing printed is one object
// with output_ids, text and finish_reason; otherwise text streams to stdout as it comes.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/json.h"
#include "engine/engine.h"
#include "engine/model/served_model.h"
#include "engine/tokenizer/text_stream.h"
#include "engine/tools/backend_flags.h"
#include "engine/tools/commands.h"
#include "engine/tools/run_tool.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

struct CompleteOptions {
  std::string model;
  std::string prompt;
  std::vector<int32_t> prompt_ids;
  BackendFlags backend;
  int32_t max_tokens = 0;
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<int32_t> top_k;
  std::optional<float> repetition_penalty;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  bool json = false;
};

std::string_view FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kEos:
      return "eos";
    case FinishReason::kStopSequence:
      return "stop_sequence";
    case FinishReason::kStopToken:
      return "stop_token";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kContextLength:
      return "context_length";
  }
  return "unspecified";
}

absl::StatusOr<std::vector<int32_t>> PromptTokens(const CompleteOptions& options,
                                                  const Tokenizer* tokenizer) {
  if (!options.prompt_ids.empty()) return options.prompt_ids;
  if (tokenizer == nullptr) {
    return InvalidArgumentError("--prompt: {} has no tokenizer; give --prompt-ids", options.model);
  }
  std::vector<int32_t> tokens;
  if (const std::optional<int32_t> bos = tokenizer->prompt_bos()) tokens.push_back(*bos);
  const std::vector<int32_t> text = tokenizer->Encode(options.prompt, SpecialText::kPlain);
  if (text.empty()) return InvalidArgumentError("--prompt: must not be empty");
  tokens.insert(tokens.end(), text.begin(), text.end());
  return tokens;
}

absl::StatusOr<GenerateRequest> MakeRequest(const CompleteOptions& options,
                                            const ServedModel& served) {
  GenerateRequest request;
  request.request_id = "complete";
  FQ_ASSIGN_OR_RETURN(request.prompt_tokens, PromptTokens(options, served.tokenizer.get()));
  request.sampling = served.defaults.sampling;
  if (options.temperature.has_value()) request.sampling.temperature = *options.temperature;
  if (options.top_p.has_value()) request.sampling.top_p = *options.top_p;
  if (options.top_k.has_value()) request.sampling.top_k = *options.top_k;
  if (options.repetition_penalty.has_value()) {
    request.sampling.repetition_penalty = *options.repetition_penalty;
  }
  if (request.sampling.top_k > served.config.vocab_size) {
    return InvalidArgumentError("--top-k: above vocabulary size (limit {}, got {})",
                                served.config.vocab_size, request.sampling.top_k);
  }
  request.sampling.seed = options.seed.has_value() ? *options.seed : std::random_device{}();
  const int32_t room = served.context_length - static_cast<int32_t>(request.prompt_tokens.size());
  request.stop.limited_by_context = options.max_tokens == 0;
  request.stop.max_output_tokens = options.max_tokens == 0 ? std::max(room, 1) : options.max_tokens;
  request.stop.ignore_eos = options.ignore_eos;
  request.stop.sequences = options.stop;
  request.arrival = SteadyClock().Now();
  return request;
}

// The answer so far, printed as it comes unless JSON was asked for.
class AnswerPrinter {
 public:
  AnswerPrinter(const ServedModel& served, const StopConditions& stop, bool streams)
      : streams_(streams) {
    if (served.tokenizer != nullptr) {
      text_stream_.emplace(served.tokenizer.get(), stop, served.defaults.eos_token_ids);
    }
  }

  void Append(int32_t token_id) {
    ids_.push_back(token_id);
    if (text_stream_.has_value()) {
      text_ += Stream(text_stream_->Append(token_id));
    } else {
      Stream(fmt::format("{}{}", ids_.size() > 1 ? " " : "", token_id));
    }
  }
  void Finish(const FinishedEvent& finished) {
    if (text_stream_.has_value()) text_ += Stream(text_stream_->Finish(finished.text_bytes));
    if (streams_) fmt::print("\n");
  }
  const std::vector<int32_t>& ids() const { return ids_; }
  // Empty for a model without a tokenizer, whose ids are streamed instead.
  const std::string& text() const { return text_; }

 private:
  std::string Stream(std::string text) const {
    if (streams_) {
      fmt::print("{}", text);
      std::fflush(stdout);
    }
    return text;
  }

  const bool streams_;
  std::optional<TextStream> text_stream_;
  std::vector<int32_t> ids_;
  std::string text_;
};

void PrintSummary(const FinishedEvent& finished) {
  const double decode_seconds = ToSeconds(finished.timing.decode);
  const int64_t gaps = finished.usage.output_tokens - 1;
  fmt::print(stderr, "{} tokens in, {} out, first token after {:.0f} ms",
             finished.usage.prompt_tokens, finished.usage.output_tokens,
             ToSeconds(finished.timing.first_token) * 1e3);
  if (gaps > 0 && decode_seconds > 0) {
    fmt::print(stderr, ", {:.1f} tokens/s", static_cast<double>(gaps) / decode_seconds);
  }
  fmt::print(stderr, ", {}\n", FinishReasonName(finished.reason));
}

absl::Status RunComplete(const CompleteOptions& options) {
  ServedModelOptions model_options;
  model_options.path = options.model;
  model_options.backend = options.backend.options();
  model_options.engine.max_sequences = 1;
  FQ_ASSIGN_OR_RETURN(const ServedModel served, LoadServedModel(model_options));
  FQ_ASSIGN_OR_RETURN(GenerateRequest request, MakeRequest(options, served));
  AnswerPrinter printer(served, request.stop, /*streams=*/!options.json);

  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                      Engine::Create(served.engine, {.runner = served.runner.get(),
                                                     .tokenizer = served.tokenizer.get(),
                                                     .eos_token_ids = served.defaults.eos_token_ids,
                                                     .vocab_size = served.config.vocab_size}));
  FQ_ASSIGN_OR_RETURN(const std::shared_ptr<RequestStream> stream,
                      engine->Submit(std::move(request)));
  while (true) {
    const StreamUpdate update = stream->WaitAndTake();
    for (const int32_t token_id : update.token_ids) printer.Append(token_id);
    if (!update.finished.has_value()) continue;
    FQ_RETURN_IF_ERROR(update.finished->status);
    printer.Finish(*update.finished);
    PrintSummary(*update.finished);
    if (options.json) {
      fmt::print("{}\n", DumpJson({{"output_ids", printer.ids()},
                                   {"text", printer.text()},
                                   {"finish_reason", FinishReasonName(update.finished->reason)}},
                                  /*indent=*/-1));
    }
    return absl::OkStatus();
  }
}

}  // namespace

void AddCompleteCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<CompleteOptions>();
  CLI::App* command =
      app.add_subcommand("complete", "Answer one prompt in this process, without a server");
  command->add_option("--model", options->model, "checkpoint folder")->required();
  auto* prompt = command->add_option_group("prompt");
  prompt->add_option("--prompt", options->prompt, "prompt as text");
  prompt->add_option("--prompt-ids", options->prompt_ids, "prompt as token ids: 1,2,3")
      ->delimiter(',');
  prompt->require_option(1);
  command->add_option("--max-tokens", options->max_tokens, "tokens at most, 0 = what fits")
      ->check(CLI::Range(int32_t{0}, std::numeric_limits<int32_t>::max()))
      ->capture_default_str();
  command->add_option("--temperature", options->temperature, "0 = greedy; unset = the model's own")
      ->check(CLI::Range(0.0, 2.0));
  command->add_option("--top-p", options->top_p, "nucleus; unset = the model's own")
      ->check(CLI::Range(1e-6, 1.0));
  command->add_option("--top-k", options->top_k, "0 = off; unset = the model's own")
      ->check(CLI::Range(int32_t{0}, std::numeric_limits<int32_t>::max()));
  command
      ->add_option("--repetition-penalty", options->repetition_penalty,
                   "of tokens of prompt and answer, 1 = off; unset = the model's own")
      ->check(CLI::Range(0.01, 2.0));
  command->add_option("--seed", options->seed, "seed of the draws; unset = random");
  command->add_option("--stop", options->stop, "stop string, may be given again");
  command->add_flag("--ignore-eos", options->ignore_eos, "go on after an end token");
  command->add_flag("--json", options->json, "print one JSON object instead of text");
  AddBackendFlags(command, &options->backend);
  command->callback(
      [options, exit_code] { *exit_code = RunTool([&] { return RunComplete(*options); }); });
}

}  // namespace flashquant
