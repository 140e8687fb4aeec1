// Reading tokenizer_config.json.
#include <array>
#include <charconv>
#include <utility>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

using Json = nlohmann::json;

constexpr char kFile[] = "tokenizer_config.json";
constexpr std::array kNamedTokens = {"bos_token", "eos_token", "unk_token", "pad_token"};

// A special token is its text, or an object with the text as "content".
absl::StatusOr<AddedToken> ParseSpecialToken(const Json& value, const char* key) {
  AddedToken token;
  if (value.is_string()) {
    token.content = value.get<std::string>();
  } else {
    FQ_ASSIGN_OR_RETURN(const JsonObject object,
                        JsonObject::Create(value, fmt::format("{}: {}", kFile, key)));
    FQ_ASSIGN_OR_RETURN(token, ParseAddedToken(object, /*is_special=*/true));
  }
  token.id = -1;
  token.special = true;
  return token;
}

absl::Status AddDecoderTokens(const JsonObject& root, TokenizerConfig* config) {
  if (!root.Has("added_tokens_decoder")) return absl::OkStatus();
  FQ_ASSIGN_OR_RETURN(const JsonObject decoder, root.GetObject("added_tokens_decoder"));
  for (const auto& [key, value] : decoder.json().items()) {
    FQ_ASSIGN_OR_RETURN(const JsonObject object,
                        JsonObject::Create(value, fmt::format("{}: added_tokens_decoder", kFile)));
    FQ_ASSIGN_OR_RETURN(AddedToken token, ParseAddedToken(object, /*is_special=*/false));
    const char* end = key.data() + key.size();
    const auto [parsed, error] = std::from_chars(key.data(), end, token.id);
    if (error != std::errc() || parsed != end || token.id < 0 || token.id >= kMaxVocabulary) {
      return DataLossError("{}: added_tokens_decoder: key must be a token id (limit {}, got '{}')",
                           kFile, kMaxVocabulary, PrintableName(key));
    }
    config->added_tokens.push_back(std::move(token));
  }
  return absl::OkStatus();
}

absl::Status AddAdditionalTokens(const JsonObject& root, TokenizerConfig* config) {
  constexpr char kKey[] = "additional_special_tokens";
  if (!root.Has(kKey)) return absl::OkStatus();
  FQ_ASSIGN_OR_RETURN(const Json* list, root.GetArray(kKey, AddedTokens::kMaxTokens));
  for (const Json& element : *list) {
    FQ_ASSIGN_OR_RETURN(AddedToken token, ParseSpecialToken(element, kKey));
    config->added_tokens.push_back(std::move(token));
  }
  return absl::OkStatus();
}

// false only where the key says so or is not there.
absl::StatusOr<std::optional<bool>> OptionalBool(const JsonObject& root, const char* key) {
  if (!root.Has(key)) return std::optional<bool>();
  FQ_ASSIGN_OR_RETURN(const bool value, root.GetBool(key));
  return std::optional(value);
}

}  // namespace

absl::StatusOr<AddedToken> ParseAddedToken(const JsonObject& object, bool is_special) {
  AddedToken token;
  FQ_ASSIGN_OR_RETURN(token.content, object.GetString("content", AddedTokens::kMaxContentBytes));
  FQ_ASSIGN_OR_RETURN(token.special, object.GetBoolOr("special", is_special));
  FQ_ASSIGN_OR_RETURN(token.single_word, object.GetBoolOr("single_word", false));
  FQ_ASSIGN_OR_RETURN(token.lstrip, object.GetBoolOr("lstrip", false));
  FQ_ASSIGN_OR_RETURN(token.rstrip, object.GetBoolOr("rstrip", false));
  FQ_ASSIGN_OR_RETURN(token.normalized, object.GetBoolOr("normalized", !token.special));
  return token;
}

absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view text) {
  FQ_ASSIGN_OR_RETURN(const Json json, ParseJson(text, kFile));
  FQ_ASSIGN_OR_RETURN(const JsonObject root, JsonObject::Create(json, kFile));
  TokenizerConfig config;
  FQ_ASSIGN_OR_RETURN(config.add_bos_token, OptionalBool(root, "add_bos_token"));
  FQ_ASSIGN_OR_RETURN(config.add_prefix_space, OptionalBool(root, "add_prefix_space"));
  FQ_RETURN_IF_ERROR(AddDecoderTokens(root, &config));
  for (const char* key : kNamedTokens) {
    const Json* value = root.Find(key);
    if (value == nullptr) continue;
    FQ_ASSIGN_OR_RETURN(AddedToken token, ParseSpecialToken(*value, key));
    if (key == kNamedTokens[0]) config.bos_token = token.content;
    if (key == kNamedTokens[1]) config.eos_token = token.content;
    config.added_tokens.push_back(std::move(token));
  }
  FQ_RETURN_IF_ERROR(AddAdditionalTokens(root, &config));
  return config;
}

}  // namespace flashquant
