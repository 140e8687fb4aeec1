// A tokenizer from SentencePiece's own file.
#include <utility>

#include "engine/checkpoint/json.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

using Kind = SentencepiecePiece::Kind;

// The order is the library's: spaces are trimmed before one is put in front.
std::vector<NormalizerStage> Stages(const SentencepieceFile& file) {
  std::vector<NormalizerStage> stages;
  if (file.remove_extra_whitespaces) stages.push_back({NormalizerStage::Kind::kTrimSpaces, "", ""});
  if (file.add_dummy_prefix) {
    stages.push_back({NormalizerStage::Kind::kPrepend, "", std::string(kVisibleSpace)});
  }
  stages.push_back({NormalizerStage::Kind::kReplace, " ", std::string(kVisibleSpace)});
  return stages;
}

// {"<|im_end|>": 32000}: what the vocabulary got after training, in folders of older programs.
absl::Status AddFileTokens(const std::string& added_tokens_json, TokenizerParts* parts) {
  constexpr char kFile[] = "added_tokens.json";
  FQ_ASSIGN_OR_RETURN(const nlohmann::json json, ParseJson(added_tokens_json, kFile));
  FQ_ASSIGN_OR_RETURN(const JsonObject root, JsonObject::Create(json, kFile));
  FQ_ASSIGN_OR_RETURN(std::vector<VocabularyEntry> entries, ParseVocabulary(root.json(), kFile));
  for (VocabularyEntry& entry : entries) {
    AddedToken token;
    token.id = entry.id;
    token.content = std::move(entry.content);
    parts->added_tokens.push_back(std::move(token));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerParts> ParseSentencepieceParts(
    std::string_view tokenizer_model, const std::optional<std::string>& added_tokens_json,
    bool may_add_prefix) {
  TokenizerParts parts;
  FQ_ASSIGN_OR_RETURN(SentencepieceFile file, ParseSentencepieceFile(tokenizer_model));
  file.add_dummy_prefix = file.add_dummy_prefix && may_add_prefix;
  parts.normalizer = Stages(file);
  for (const SentencepiecePiece& piece : file.pieces) {
    const auto id = static_cast<int32_t>(parts.vocabulary.size());
    parts.vocabulary.push_back({piece.content, id});
    if (piece.kind != Kind::kControl && piece.kind != Kind::kUnknown) continue;
    AddedToken token;
    token.id = id;
    token.content = piece.content;
    token.special = true;
    parts.added_tokens.push_back(std::move(token));
  }
  if (added_tokens_json) FQ_RETURN_IF_ERROR(AddFileTokens(*added_tokens_json, &parts));
  if (!file.bos.empty()) parts.bos_token = file.bos;
  if (!file.eos.empty()) parts.eos_token = file.eos;
  parts.adds_bos = parts.bos_token.has_value();
  parts.sentencepiece = std::move(file);
  return parts;
}

}  // namespace flashquant
