#include "engine/model/generation_defaults.h"

#include <optional>

#include "engine/checkpoint/json.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr size_t kMaxEosTokens = 16;

absl::Status CheckEosToken(const JsonObject& object, const nlohmann::json& id, int32_t vocab_size) {
  if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= vocab_size) {
    return object.Error("eos_token_id", fmt::format("must be a token id (limit {}, got {})",
                                                    vocab_size - 1, id.dump().substr(0, 32)));
  }
  return absl::OkStatus();
}

// The ids of "eos_token_id", a number or a list; nullopt when it is not set.
absl::StatusOr<std::optional<std::vector<int32_t>>> ReadEosTokens(const JsonObject& object,
                                                                  int32_t vocab_size) {
  const nlohmann::json* value = object.Find("eos_token_id");
  if (value == nullptr) return std::nullopt;
  const nlohmann::json ids = value->is_array() ? *value : nlohmann::json::array({*value});
  if (ids.size() > kMaxEosTokens) {
    return object.Error("eos_token_id",
                        fmt::format("too many (limit {}, got {})", kMaxEosTokens, ids.size()));
  }
  std::vector<int32_t> tokens;
  for (const nlohmann::json& id : ids) {
    FQ_RETURN_IF_ERROR(CheckEosToken(object, id, vocab_size));
    tokens.push_back(id.get<int32_t>());
  }
  return tokens;
}

}  // namespace

absl::StatusOr<GenerationDefaults> ParseGenerationDefaults(const Checkpoint& checkpoint,
                                                           const ModelConfig& config) {
  FQ_ASSIGN_OR_RETURN(const JsonObject generation,
                      JsonObject::Create(checkpoint.generation_config, "generation_config.json"));
  FQ_ASSIGN_OR_RETURN(const JsonObject model, JsonObject::Create(checkpoint.config, "config.json"));
  GenerationDefaults defaults;
  FQ_ASSIGN_OR_RETURN(const double temperature,
                      generation.GetDoubleOr("temperature", 1.0, 0.0, 2.0));
  FQ_ASSIGN_OR_RETURN(const double top_p, generation.GetDoubleOr("top_p", 1.0, 1e-6, 1.0));
  FQ_ASSIGN_OR_RETURN(const double min_p, generation.GetDoubleOr("min_p", 0.0, 0.0, 1.0));
  FQ_ASSIGN_OR_RETURN(const int64_t top_k, generation.GetIntOr("top_k", 0, 0, config.vocab_size));
  FQ_ASSIGN_OR_RETURN(const double repetition_penalty,
                      generation.GetDoubleOr("repetition_penalty", 1.0, 1e-6, 2.0));
  defaults.sampling.repetition_penalty = static_cast<float>(repetition_penalty);
  defaults.sampling.temperature = static_cast<float>(temperature);
  defaults.sampling.top_p = static_cast<float>(top_p);
  defaults.sampling.min_p = static_cast<float>(min_p);
  defaults.sampling.top_k = static_cast<int32_t>(top_k);

  for (const JsonObject* object : {&generation, &model}) {
    FQ_ASSIGN_OR_RETURN(const auto tokens, ReadEosTokens(*object, config.vocab_size));
    if (!tokens.has_value()) continue;
    defaults.eos_token_ids = *tokens;
    break;
  }
  return defaults;
}

}  // namespace flashquant
