#include "engine/checkpoint/gguf_tokenizer.h"

#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/base/split_patterns.h"
#include "engine/checkpoint/gguf_sentencepiece.h"
#include "engine/checkpoint/json.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

using Json = nlohmann::json;

// tokenizer.ggml.token_type
constexpr int64_t kUnknownToken = 2;
constexpr int64_t kControlToken = 3;
constexpr int64_t kUserDefinedToken = 4;
constexpr int64_t kMaxTokenType = 6;

Json ByteLevel(bool add_prefix_space, bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

struct PreTokenizer {
  Json json;
  bool ignore_merges = false;  // a whole word that is in the vocabulary is not built from merges
  bool adds_bos = false;       // when the file does not say
};

std::optional<PreTokenizer> PreTokenizerByName(std::string_view name) {
  // "default" is the name for a plain GPT-2 style tokenizer.
  if (name == "gpt-2" || name == "default") return PreTokenizer{ByteLevel(false, true)};
  if (name == "smollm") {
    return PreTokenizer{
        {{"type", "Sequence"},
         {"pretokenizers",
          {{{"type", "Digits"}, {"individual_digits", true}}, ByteLevel(false, true)}}}};
  }
  if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") {
    return PreTokenizer{{{"type", "Sequence"},
                         {"pretokenizers",
                          {{{"type", "Split"},
                            {"pattern", {{"Regex", kLlama3SplitRegex}}},
                            {"behavior", "Isolated"},
                            {"invert", false}},
                           ByteLevel(false, false)}}},
                        true,
                        true};
  }
  return std::nullopt;
}

struct Vocabulary {
  const std::vector<std::string>* tokens = nullptr;
  const std::vector<int64_t>* types = nullptr;  // as long as tokens
};

absl::StatusOr<Vocabulary> ReadVocabulary(const GgufFile& gguf) {
  Vocabulary vocabulary;
  FQ_ASSIGN_OR_RETURN(vocabulary.tokens, gguf.GetStrings("tokenizer.ggml.tokens"));
  FQ_ASSIGN_OR_RETURN(vocabulary.types, gguf.GetInts("tokenizer.ggml.token_type"));
  if (vocabulary.tokens->empty()) return gguf.Error("tokenizer.ggml.tokens", "empty");
  if (vocabulary.types->size() != vocabulary.tokens->size()) {
    return gguf.Error("tokenizer.ggml.token_type",
                      fmt::format("must have one value per token (need {}, got {})",
                                  vocabulary.tokens->size(), vocabulary.types->size()));
  }
  for (const int64_t type : *vocabulary.types) {
    if (type >= 1 && type <= kMaxTokenType) continue;
    return gguf.Error("tokenizer.ggml.token_type",
                      fmt::format("out of range (limit 1..{}, got {})", kMaxTokenType, type));
  }
  return vocabulary;
}

absl::StatusOr<const std::vector<std::string>*> ReadMerges(const GgufFile& gguf) {
  FQ_ASSIGN_OR_RETURN(const std::vector<std::string>* merges,
                      gguf.GetStrings("tokenizer.ggml.merges"));
  for (const std::string& merge : *merges) {
    const size_t space = merge.find(' ');
    if (space == std::string::npos || space == 0 || space + 1 == merge.size() ||
        merge.find(' ', space + 1) != std::string::npos) {
      return gguf.Error(
          "tokenizer.ggml.merges",
          fmt::format("must be two parts with a space between (got {})", PrintableName(merge)));
    }
  }
  return merges;
}

absl::StatusOr<Json> VocabularyJson(const GgufFile& gguf, const Vocabulary& vocabulary) {
  Json vocab = Json::object();
  for (size_t id = 0; id < vocabulary.tokens->size(); ++id) {
    const std::string& token = (*vocabulary.tokens)[id];
    if (token.empty()) {
      return gguf.Error("tokenizer.ggml.tokens", fmt::format("token {} is empty", id));
    }
    if (!vocab.emplace(token, id).second) {
      return gguf.Error("tokenizer.ggml.tokens",
                        fmt::format("token {} occurs twice ({})", id, PrintableName(token)));
    }
  }
  return vocab;
}

Json AddedTokensJson(const Vocabulary& vocabulary) {
  Json added = Json::array();
  for (size_t id = 0; id < vocabulary.tokens->size(); ++id) {
    const int64_t type = (*vocabulary.types)[id];
    const bool special = type == kControlToken || type == kUnknownToken;
    if (!special && type != kUserDefinedToken) continue;
    added.push_back({{"id", id},
                     {"content", (*vocabulary.tokens)[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", special}});
  }
  return added;
}

// Puts BOS before the text when special tokens are asked for.
Json BosTemplate(const std::string& bos, int64_t bos_id) {
  const auto special = [&](int type_id) -> Json {
    return {{"SpecialToken", {{"id", bos}, {"type_id", type_id}}}};
  };
  const auto sequence = [](const char* id, int type_id) -> Json {
    return {{"Sequence", {{"id", id}, {"type_id", type_id}}}};
  };
  return {{"type", "TemplateProcessing"},
          {"single", Json::array({special(0), sequence("A", 0)})},
          {"pair", Json::array({special(0), sequence("A", 0), special(1), sequence("B", 1)})},
          {"special_tokens",
           {{bos, {{"id", bos}, {"ids", Json::array({bos_id})}, {"tokens", Json::array({bos})}}}}}};
}

// Names the special tokens; `config` gets "bos_token" and so on where the file has the id.
absl::Status AddSpecialTokens(const GgufFile& gguf, const Vocabulary& vocabulary, Json* config) {
  constexpr std::array<std::pair<const char*, const char*>, 4> kKeys = {{
      {"tokenizer.ggml.bos_token_id", "bos_token"},
      {"tokenizer.ggml.eos_token_id", "eos_token"},
      {"tokenizer.ggml.unknown_token_id", "unk_token"},
      {"tokenizer.ggml.padding_token_id", "pad_token"},
  }};
  for (const auto& [key, name] : kKeys) {
    if (!gguf.Has(key)) continue;
    FQ_ASSIGN_OR_RETURN(const int64_t id,
                        gguf.GetInt(key, 0, static_cast<int64_t>(vocabulary.tokens->size()) - 1));
    (*config)[name] = (*vocabulary.tokens)[static_cast<size_t>(id)];
  }
  return absl::OkStatus();
}

// tokenizer_config.json. default_add_bos: where the file does not say.
absl::StatusOr<Json> ConfigJson(const GgufFile& gguf, const Vocabulary& vocabulary,
                                bool default_add_bos, const char* tokenizer_class) {
  FQ_ASSIGN_OR_RETURN(const bool add_bos,
                      gguf.GetBoolOr("tokenizer.ggml.add_bos_token", default_add_bos));
  Json config = {{"tokenizer_class", tokenizer_class},
                 {"clean_up_tokenization_spaces", false},
                 {"add_bos_token", add_bos}};
  FQ_RETURN_IF_ERROR(AddSpecialTokens(gguf, vocabulary, &config));
  if (add_bos && !config.contains("bos_token")) {
    return gguf.Error("tokenizer.ggml.bos_token_id", "missing although add_bos_token is set");
  }
  if (gguf.Has("tokenizer.chat_template")) {
    FQ_ASSIGN_OR_RETURN(config["chat_template"], gguf.GetString("tokenizer.chat_template"));
  }
  return config;
}

absl::StatusOr<Json> ByteLevelJson(const GgufFile& gguf, const Vocabulary& vocabulary,
                                   const PreTokenizer& pre) {
  FQ_ASSIGN_OR_RETURN(Json vocab, VocabularyJson(gguf, vocabulary));
  FQ_ASSIGN_OR_RETURN(const std::vector<std::string>* merges, ReadMerges(gguf));
  return Json{{"version", "1.0"},
              {"truncation", nullptr},
              {"padding", nullptr},
              {"added_tokens", AddedTokensJson(vocabulary)},
              {"normalizer", nullptr},
              {"pre_tokenizer", pre.json},
              {"post_processor", nullptr},
              {"decoder", ByteLevel(true, true)},
              {"model",
               {{"type", "BPE"},
                {"dropout", nullptr},
                {"unk_token", nullptr},
                {"continuing_subword_prefix", nullptr},
                {"end_of_word_suffix", nullptr},
                {"fuse_unk", false},
                {"byte_fallback", false},
                {"ignore_merges", pre.ignore_merges},
                {"vocab", std::move(vocab)},
                {"merges", *merges}}}};
}

absl::StatusOr<GgufTokenizerFiles> ByteLevelFiles(const GgufFile& gguf) {
  FQ_ASSIGN_OR_RETURN(const std::string pre_name, gguf.GetString("tokenizer.ggml.pre"));
  const std::optional<PreTokenizer> pre = PreTokenizerByName(pre_name);
  if (!pre.has_value()) {
    return UnimplementedError(
        "{}: tokenizer: unsupported pre-tokenizer '{}' (gpt-2, default, smollm, llama-bpe are "
        "supported)",
        gguf.path(), PrintableName(pre_name));
  }
  FQ_ASSIGN_OR_RETURN(const Vocabulary vocabulary, ReadVocabulary(gguf));
  FQ_ASSIGN_OR_RETURN(Json tokenizer, ByteLevelJson(gguf, vocabulary, *pre));
  FQ_ASSIGN_OR_RETURN(const Json config,
                      ConfigJson(gguf, vocabulary, pre->adds_bos, "PreTrainedTokenizerFast"));
  if (config["add_bos_token"].get<bool>()) {
    FQ_ASSIGN_OR_RETURN(const int64_t bos_id,
                        gguf.GetInt("tokenizer.ggml.bos_token_id", 0,
                                    static_cast<int64_t>(vocabulary.tokens->size()) - 1));
    tokenizer["post_processor"] = BosTemplate(config["bos_token"].get<std::string>(), bos_id);
  }
  GgufTokenizerFiles files;
  files.tokenizer_json = DumpJson(tokenizer, 1) + "\n";
  files.tokenizer_config_json = DumpJson(config) + "\n";
  return files;
}

absl::StatusOr<GgufTokenizerFiles> SentencepieceFiles(const GgufFile& gguf) {
  FQ_ASSIGN_OR_RETURN(const Vocabulary vocabulary, ReadVocabulary(gguf));
  GgufTokenizerFiles files;
  FQ_ASSIGN_OR_RETURN(files.tokenizer_model,
                      SentencepieceFromGguf(gguf, *vocabulary.tokens, *vocabulary.types));
  FQ_ASSIGN_OR_RETURN(const Json config,
                      ConfigJson(gguf, vocabulary, /*default_add_bos=*/true, "LlamaTokenizer"));
  files.tokenizer_config_json = DumpJson(config) + "\n";
  return files;
}

}  // namespace

absl::StatusOr<GgufTokenizerFiles> TokenizerFromGguf(const GgufFile& gguf) {
  FQ_ASSIGN_OR_RETURN(const std::string model, gguf.GetString("tokenizer.ggml.model"));
  if (model == "gpt2") return ByteLevelFiles(gguf);
  if (model == "llama") return SentencepieceFiles(gguf);
  return UnimplementedError("{}: tokenizer: unsupported model '{}' (gpt2 and llama are supported)",
                            gguf.path(), PrintableName(model));
}

}  // namespace flashquant
