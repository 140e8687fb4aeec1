// TokenizerParts: what the files of a tokenizer say, parsed and checked one by one, before they are
// put together (tokenizer_loader.h). No file access.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/json.h"
#include "engine/tokenizer/added_tokens.h"
#include "engine/tokenizer/bpe_model.h"
#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/sentencepiece_file.h"
#include "nlohmann/json.hpp"

namespace flashquant {

struct TokenizerParts {
  // Set: the model is this one, and vocabulary only lists its pieces. Else it is BPE of what
  // follows.
  std::optional<SentencepieceFile> sentencepiece;
  std::vector<VocabularyEntry> vocabulary;
  std::vector<MergeRule> merges;
  bool ignore_merges = false;
  bool has_unk_token = false;
  BpeAlphabet alphabet = BpeAlphabet::kBytes;
  // For kCharacters, as BpeModel::Options.
  bool byte_fallback = false;
  bool fuse_unk = false;
  std::string unk_token;
  std::string shown_pattern;
  std::string shown_content;
  std::vector<NormalizerStage> normalizer;
  std::vector<AddedToken> added_tokens;
  std::vector<PreTokenizerStage> stages;
  // The post-processor says what comes before a text: decides alone when it has a template.
  bool has_template = false;
  std::optional<int32_t> template_bos;
  // Where neither a template nor tokenizer_config.json says it.
  bool adds_bos = false;
  std::optional<std::string> bos_token;
  std::optional<std::string> eos_token;
};

// What tokenizer_config.json says.
struct TokenizerConfig {
  std::optional<std::string> bos_token;
  std::optional<std::string> eos_token;
  // added_tokens_decoder, with ids; then BOS, EOS, unk, pad and additional ones, with id -1. May
  // name a token twice: the first counts.
  std::vector<AddedToken> added_tokens;
  std::optional<bool> add_bos_token;
  std::optional<bool> add_prefix_space;
};

// tokenizer.json. DATA_LOSS for broken content; UNIMPLEMENTED "tokenizer.json: tokenizer:
// unsupported ‹kind› '‹name›'" for a normalizer, pre_tokenizer, model, post_processor or decoder
// that we do not know or an option of theirs that we do not have.
absl::StatusOr<TokenizerParts> ParseTokenizerJson(std::string_view text);

// vocab.json and merges.txt, as GPT-2 has them: byte-level BPE with GPT-2's pattern. DATA_LOSS.
absl::StatusOr<TokenizerParts> ParseVocabAndMerges(std::string_view vocab_json,
                                                   std::string_view merges_txt);

// tokenizer.model, with added_tokens.json where there is one (nullopt: none). Its control pieces
// and the unknown one are special added tokens; BOS is added as LlamaTokenizer does.
// may_add_prefix: tokenizer_config.json does not forbid the space in front that the file asks for.
// DATA_LOSS and UNIMPLEMENTED as ParseSentencepieceFile.
absl::StatusOr<TokenizerParts> ParseSentencepieceParts(
    std::string_view tokenizer_model, const std::optional<std::string>& added_tokens_json,
    bool may_add_prefix);

// tokenizer_config.json. DATA_LOSS.
absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view text);

// "vocab" object: content to id. `file` for messages.
absl::StatusOr<std::vector<VocabularyEntry>> ParseVocabulary(const nlohmann::json& vocab,
                                                             const std::string& file);

// A token of an added_tokens list, its id apart. is_special: where the object does not say.
absl::StatusOr<AddedToken> ParseAddedToken(const JsonObject& object, bool is_special);

}  // namespace flashquant
