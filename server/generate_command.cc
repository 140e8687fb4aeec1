// flashquant generate: one request to a running server, its answer streamed.
//
// Text goes to stdout as it comes, figures and errors to stderr; with --json stdout has one object
// a line: the messages of the stream, or the error.
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/exit_code.h"
#include "fmt/format.h"
#include "grpcpp/support/status.h"
#include "nlohmann/json.hpp"
#include "server/client_flags.h"
#include "server/commands.h"
#include "server/inference_client.h"
#include "server/status_mapping.h"
#include "server/stream_printer.h"

namespace flashquant {
namespace {

struct GenerateFlags {
  ClientFlags client;
  std::string prompt;
  std::vector<uint32_t> prompt_ids;
  std::string system;
  bool chat = false;
  std::optional<uint32_t> max_tokens;
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<uint32_t> top_k;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<float> presence_penalty;
  std::optional<float> frequency_penalty;
  std::vector<std::pair<uint32_t, float>> logit_bias;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  std::optional<uint32_t> top_logprobs;
  uint32_t tokens_per_message = 0;
  int32_t priority = 0;
  std::string cache_salt;
  std::optional<double> timeout_seconds;
  bool json = false;
};

void SetSampling(const GenerateFlags& flags, v1::SamplingParams* sampling) {
  if (flags.temperature) sampling->set_temperature(*flags.temperature);
  if (flags.top_p) sampling->set_top_p(*flags.top_p);
  if (flags.top_k) sampling->set_top_k(*flags.top_k);
  if (flags.min_p) sampling->set_min_p(*flags.min_p);
  if (flags.repetition_penalty) sampling->set_repetition_penalty(*flags.repetition_penalty);
  if (flags.presence_penalty) sampling->set_presence_penalty(*flags.presence_penalty);
  if (flags.frequency_penalty) sampling->set_frequency_penalty(*flags.frequency_penalty);
  for (const auto& [id, value] : flags.logit_bias) {
    v1::LogitBias* bias = sampling->add_logit_bias();
    bias->set_token_id(id);
    bias->set_bias(value);
  }
  if (flags.seed) sampling->set_seed(*flags.seed);
}

v1::GenerateRequest MakeRequest(const GenerateFlags& flags) {
  v1::GenerateRequest request;
  if (!flags.prompt_ids.empty()) {
    request.mutable_token_ids()->mutable_ids()->Add(flags.prompt_ids.begin(),
                                                    flags.prompt_ids.end());
    request.mutable_output()->set_token_ids(true);
  } else if (flags.chat) {
    if (!flags.system.empty()) {
      v1::ChatMessage* system = request.mutable_chat()->add_messages();
      system->set_role("system");
      system->set_content(flags.system);
    }
    v1::ChatMessage* user = request.mutable_chat()->add_messages();
    user->set_role("user");
    user->set_content(flags.prompt);
  } else {
    request.set_text(flags.prompt);
  }
  SetSampling(flags, request.mutable_sampling());
  v1::OutputOptions* output = request.mutable_output();
  if (flags.top_logprobs) output->set_top_logprobs(*flags.top_logprobs);
  output->set_tokens_per_message(flags.tokens_per_message);
  if (flags.priority != 0) request.set_priority(flags.priority);
  request.set_cache_salt(flags.cache_salt);
  v1::StopConditions* stop = request.mutable_stop();
  if (flags.max_tokens) stop->set_max_output_tokens(*flags.max_tokens);
  for (const std::string& sequence : flags.stop) stop->add_sequences(sequence);
  stop->set_ignore_eos(flags.ignore_eos);
  return request;
}

// What a user can do about an error; empty when its text says enough.
std::string NextStep(const CallResult& result, const std::string& target) {
  if (result.reason == "MODEL_LOADING") return "wait until `flashquant health` says serving";
  if (result.reason == "QUEUE_FULL" || result.reason == "QUEUE_TIMEOUT") return "try again later";
  if (result.reason == "DRAINING" || result.reason == "ENGINE_FAILED") {
    return "try again when the server is back";
  }
  if (result.reason.empty() && result.code == grpc::StatusCode::UNAVAILABLE) {
    return fmt::format(
        "is a server running at {}, and does it use TLS like this command (--tls-ca)?", target);
  }
  if (result.reason == "CREDENTIALS_MISSING") return "give --token-file FILE";
  if (result.reason == "CREDENTIALS_INVALID") return "the token in --token-file is not valid here";
  if (result.code == grpc::StatusCode::DEADLINE_EXCEEDED)
    return "give --timeout more seconds, or ask for fewer tokens";
  return "";
}

int ExitCodeOf(const CallResult& result) {
  return ExitCodeFor(absl::Status(static_cast<absl::StatusCode>(result.code), ""));
}

int ReportFailure(const CallResult& result, const GenerateFlags& flags) {
  const std::string next_step = NextStep(result, flags.client.target);
  if (flags.json) {
    nlohmann::json error = {{"code", StatusCodeName(result.code)}, {"message", result.message}};
    if (!result.reason.empty()) error["reason"] = result.reason;
    if (!result.violations.empty()) error["violations"] = result.violations;
    using Json = nlohmann::json;
    fmt::print("{}\n",
               Json({{"error", error}}).dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  fmt::print(stderr, "flashquant: {}: {}{}\n", StatusCodeName(result.code),
             result.reason.empty() ? "" : result.reason + ": ", result.message);
  // The first violation is the message already.
  for (size_t i = 1; i < result.violations.size(); ++i) {
    fmt::print(stderr, "  also {}\n", result.violations[i]);
  }
  if (!next_step.empty()) fmt::print(stderr, "  {}\n", next_step);
  return ExitCodeOf(result);
}

int RunGenerate(const GenerateFlags& flags) {
  const absl::StatusOr<ClientSecurity> security = LoadClientSecurity(flags.client);
  if (!security.ok()) return ReportStatus(security.status());
  InferenceClient client(flags.client.target, *security);
  CallOptions options;
  if (flags.timeout_seconds) {
    options.timeout = std::chrono::milliseconds(static_cast<int64_t>(*flags.timeout_seconds * 1e3));
  }
  StreamPrinter printer(flags.json);
  CallResult result = client.Generate(
      MakeRequest(flags),
      [&](const v1::GenerateResponse& response) { return printer.Print(response); }, options);
  if (!result.ok()) return ReportFailure(result, flags);
  if (!printer.finished()) {
    result.code = grpc::StatusCode::INTERNAL;
    result.message = "the stream ended without its last message";
    return ReportFailure(result, flags);
  }
  printer.PrintSummary();
  return 0;
}

void AddSamplingFlags(GenerateFlags* flags, CLI::App* command) {
  command->add_option("--temperature", flags->temperature, "0 = greedy; unset = the model's own");
  command->add_option("--top-p", flags->top_p, "unset = the model's own");
  command->add_option("--top-k", flags->top_k, "0 = off; unset = the model's own");
  command->add_option("--min-p", flags->min_p, "unset = the model's own");
  command->add_option("--repetition-penalty", flags->repetition_penalty,
                      "of tokens of prompt and answer, 1 = off; unset = the model's own");
  command->add_option("--presence-penalty", flags->presence_penalty,
                      "of tokens of the answer, 0 = off");
  command->add_option("--frequency-penalty", flags->frequency_penalty,
                      "the same for each time that the answer has the token");
  command
      ->add_option("--logit-bias", flags->logit_bias,
                   "ID=BIAS, added to a token's logit; may be given again")
      ->delimiter('=');
  command->add_option("--seed", flags->seed, "seed of the draws; unset = the server draws one");
}

}  // namespace

void AddGenerateCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = app.add_subcommand("generate", "Ask a running server and stream its answer");
  AddClientFlags(&flags->client, command);
  auto* prompt = command->add_option_group("prompt");
  prompt->add_option("--prompt", flags->prompt, "prompt as text");
  CLI::Option* prompt_ids =
      prompt->add_option("--prompt-ids", flags->prompt_ids, "prompt as token ids: 1,2,3")
          ->delimiter(',');
  prompt->require_option(1);
  CLI::Option* chat = command->add_flag("--chat", flags->chat, "send the prompt as a chat message");
  chat->excludes(prompt_ids);
  command->add_option("--system", flags->system, "system message, with --chat")->needs(chat);
  command->add_option("--max-tokens", flags->max_tokens, "tokens at most; unset = what fits");
  AddSamplingFlags(flags.get(), command);
  command->add_option("--stop", flags->stop, "stop sequence; may be given again");
  command->add_flag("--ignore-eos", flags->ignore_eos, "go on after an end token");
  command->add_option("--tokens-per-message", flags->tokens_per_message,
                      "gather so many tokens per message, for at most 200 ms; 0 = as they come");
  command->add_option("--priority", flags->priority, "-10 to 10, higher first")
      ->capture_default_str();
  command->add_option("--cache-salt", flags->cache_salt,
                      "share work on prompts only with requests of the same salt");
  command->add_option("--timeout", flags->timeout_seconds, "seconds; unset = the server's maximum")
      ->check(CLI::Range(0.001, 86400.0));
  CLI::Option* json =
      command->add_flag("--json", flags->json, "print one JSON object a line instead of text");
  command
      ->add_option("--logprobs", flags->top_logprobs,
                   "with --json: logprobs of each token and of so many of the likeliest ones")
      ->needs(json);
  command->callback([flags, exit_code] { *exit_code = RunGenerate(*flags); });
}

}  // namespace flashquant
