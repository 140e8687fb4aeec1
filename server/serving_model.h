// From a loaded model to what the server answers with: limits, defaults, chat format, description.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/metrics.h"
#include "engine/model/served_model.h"
#include "engine/tokenizer/chat_format.h"
#include "server/call_submitter.h"
#include "server/server_config.h"

namespace flashquant {

// The chat format of the model's folder, nullopt when chat prompts cannot be served: no tokenizer,
// or a template of a layout that we do not know.
absl::StatusOr<std::optional<ChatFormat>> LoadChatFormat(const ServedModel& model);

// Tokens that end an answer: the model's, and those that end a turn of its chat format.
std::vector<int32_t> EndTokens(const ServedModel& model, const std::optional<ChatFormat>& chat);

// Name of the model in requests: config.model_name, else the last part of the path.
std::string ModelName(const ServerConfig& config);

// Identifies config.json and the start of every weight file (shapes and checksums are there): 8 hex
// digits.
absl::StatusOr<std::string> ModelRevision(const std::string& path);

// `chat`, `model` and `engine` outlive the result.
absl::StatusOr<std::unique_ptr<const ServingModel>> MakeServingModel(
    const ServerConfig& config, const ServedModel& model, const std::optional<ChatFormat>& chat,
    Engine* engine);

// Sets the metrics that describe the model.
void DescribeModel(const ServedModel& model, const std::string& revision, Metrics* metrics);

}  // namespace flashquant
