// The checks here are those that need more than one section or file.
#include "engine/tokenizer/tokenizer_loader.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/tokenizer/bpe_model.h"
#include "engine/tokenizer/bpe_tokenizer.h"
#include "engine/tokenizer/sentencepiece_model.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// Vocabularies of 150 000 tokens take about 11 MiB.
constexpr int64_t kMaxFileBytes = int64_t{64} << 20;

// The older files list their control tokens, or what is said of them, in tokenizer_config.json
// only: the first who lists a token counts.
void MergeConfigTokens(const TokenizerConfig& config, TokenizerParts* parts) {
  std::vector<AddedToken> tokens = config.added_tokens;
  std::move(parts->added_tokens.begin(), parts->added_tokens.end(), std::back_inserter(tokens));
  parts->added_tokens.clear();
  absl::flat_hash_map<std::string, int32_t> ids;
  for (const AddedToken& token : tokens) ids.emplace(token.content, -1);
  for (const VocabularyEntry& entry : parts->vocabulary) {
    if (const auto it = ids.find(entry.content); it != ids.end()) it->second = entry.id;
  }
  absl::flat_hash_set<std::string> seen;
  for (AddedToken& token : tokens) {
    if (token.id < 0) token.id = ids[token.content];
    if (token.id < 0 || !seen.insert(token.content).second) continue;
    parts->added_tokens.push_back(std::move(token));
  }
}

absl::Status CheckIds(const SubwordModel& model, const AddedTokens& added,
                      const std::string& file) {
  int32_t num_ids = model.vocab_size();
  for (const AddedToken& token : added.tokens()) num_ids = std::max(num_ids, token.id + 1);
  std::vector<bool> used(static_cast<size_t>(num_ids));
  for (int32_t id = 0; id < model.vocab_size(); ++id) {
    used[static_cast<size_t>(id)] = model.HasId(id);
  }
  for (const AddedToken& token : added.tokens()) {
    const std::optional<int32_t> model_id = model.TokenId(token.content);
    if (model_id.value_or(token.id) != token.id || (!model_id && model.HasId(token.id))) {
      return DataLossError("{}: added_tokens: id {} is another token in model.vocab", file,
                           token.id);
    }
    used[static_cast<size_t>(token.id)] = true;
  }
  const auto hole = std::find(used.begin(), used.end(), false);
  if (hole == used.end()) return absl::OkStatus();
  return DataLossError("{}: model.vocab: ids have holes (no token {}, greatest id {})", file,
                       hole - used.begin(), num_ids - 1);
}

absl::StatusOr<std::optional<int32_t>> FindToken(const std::optional<std::string>& content,
                                                 const char* key, const SubwordModel& model,
                                                 const AddedTokens& added) {
  if (!content) return std::optional<int32_t>();
  if (const int32_t index = added.Find(*content); index >= 0) {
    return std::optional(added.tokens()[static_cast<size_t>(index)].id);
  }
  const std::optional<int32_t> id = model.TokenId(*content);
  if (!id) {
    return DataLossError("tokenizer_config.json: {}: '{}' is not in the vocabulary", key,
                         PrintableName(*content));
  }
  return id;
}

absl::StatusOr<BpeTokenizer::SpecialIds> FindSpecialIds(const TokenizerParts& parts,
                                                        const TokenizerConfig& config,
                                                        const SubwordModel& model,
                                                        const AddedTokens& added) {
  BpeTokenizer::SpecialIds ids;
  const auto& bos = config.bos_token ? config.bos_token : parts.bos_token;
  const auto& eos = config.eos_token ? config.eos_token : parts.eos_token;
  FQ_ASSIGN_OR_RETURN(ids.bos, FindToken(bos, "bos_token", model, added));
  FQ_ASSIGN_OR_RETURN(ids.eos, FindToken(eos, "eos_token", model, added));
  if (parts.template_bos) {
    const bool is_added = std::any_of(added.tokens().begin(), added.tokens().end(),
                                      [&](const auto& t) { return t.id == *parts.template_bos; });
    if (!is_added && !model.HasId(*parts.template_bos)) {
      return DataLossError("tokenizer.json: post_processor: token id {} is not in the vocabulary",
                           *parts.template_bos);
    }
    if (!ids.bos) ids.bos = parts.template_bos;
  }
  if (parts.has_template) {
    ids.prompt_bos = parts.template_bos;
  } else if (config.add_bos_token.value_or(parts.adds_bos)) {
    if (!ids.bos) {
      return DataLossError("tokenizer_config.json: add_bos_token: needs a bos_token");
    }
    ids.prompt_bos = ids.bos;
  }
  return ids;
}

// What the files say, in one form. Sets `file` to the name of the one with the vocabulary.
absl::StatusOr<TokenizerParts> ParseParts(const TokenizerFiles& files,
                                          const TokenizerConfig& config, std::string* file) {
  if (files.tokenizer_json) {
    *file = "tokenizer.json";
    return ParseTokenizerJson(*files.tokenizer_json);
  }
  TokenizerParts parts;
  if (files.vocab_json && files.merges_txt) {
    *file = "vocab.json";
    FQ_ASSIGN_OR_RETURN(parts, ParseVocabAndMerges(*files.vocab_json, *files.merges_txt));
    parts.stages.front().add_prefix_space = config.add_prefix_space.value_or(false);
  } else if (files.tokenizer_model) {
    *file = "tokenizer.model";
    FQ_ASSIGN_OR_RETURN(parts,
                        ParseSentencepieceParts(*files.tokenizer_model, files.added_tokens_json,
                                                config.add_prefix_space.value_or(true)));
  } else {
    return NotFoundError(
        "tokenizer: no tokenizer.json, vocab.json with merges.txt, or tokenizer.model");
  }
  MergeConfigTokens(config, &parts);
  return parts;
}

// Takes the vocabulary out of `parts`.
absl::StatusOr<std::unique_ptr<const SubwordModel>> MakeModel(const std::string& file,
                                                              TokenizerParts* parts) {
  BpeModel::Options options;
  for (const AddedToken& token : parts->added_tokens) {
    if (token.special) options.control.push_back(token.id);
  }
  if (parts->sentencepiece) {
    return std::make_unique<SentencepieceModel>(*parts->sentencepiece, options.control);
  }
  options.file = file;
  options.ignore_merges = parts->ignore_merges;
  options.may_drop_bytes = !parts->has_unk_token;
  options.alphabet = parts->alphabet;
  options.byte_fallback = parts->byte_fallback;
  options.fuse_unk = parts->fuse_unk;
  options.unk_token = parts->unk_token;
  options.shown_pattern = parts->shown_pattern;
  options.shown_content = parts->shown_content;
  FQ_ASSIGN_OR_RETURN(BpeModel model,
                      BpeModel::Create(std::move(parts->vocabulary), parts->merges, options));
  return std::make_unique<BpeModel>(std::move(model));
}

// The file's text, nullopt when there is no such file.
absl::StatusOr<std::optional<std::string>> ReadIfThere(const std::filesystem::path& path) {
  absl::StatusOr<std::string> text = ReadFile(path.string(), kMaxFileBytes);
  if (absl::IsNotFound(text.status())) return std::optional<std::string>();
  FQ_RETURN_IF_ERROR(text.status());
  return std::optional(*std::move(text));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(const TokenizerFiles& files) {
  TokenizerConfig config;
  if (files.tokenizer_config) {
    FQ_ASSIGN_OR_RETURN(config, ParseTokenizerConfig(*files.tokenizer_config));
  }
  std::string file;  // for messages
  FQ_ASSIGN_OR_RETURN(TokenizerParts parts, ParseParts(files, config, &file));
  Normalizer normalizer(std::move(parts.normalizer));
  for (AddedToken& token : parts.added_tokens) {
    if (token.normalized) token.pattern = normalizer.Apply(token.content);
  }
  FQ_ASSIGN_OR_RETURN(std::unique_ptr<const SubwordModel> model, MakeModel(file, &parts));
  FQ_ASSIGN_OR_RETURN(AddedTokens added, AddedTokens::Create(std::move(parts.added_tokens), file));
  FQ_RETURN_IF_ERROR(CheckIds(*model, added, file));
  FQ_ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer, PreTokenizer::Create(parts.stages));
  FQ_ASSIGN_OR_RETURN(const BpeTokenizer::SpecialIds ids,
                      FindSpecialIds(parts, config, *model, added));
  return std::unique_ptr<Tokenizer>(std::make_unique<BpeTokenizer>(
      std::move(model), std::move(added), std::move(normalizer), std::move(pre_tokenizer), ids));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& dir) {
  const std::filesystem::path folder(dir);
  TokenizerFiles files;
  FQ_ASSIGN_OR_RETURN(files.tokenizer_config, ReadIfThere(folder / "tokenizer_config.json"));
  FQ_ASSIGN_OR_RETURN(files.tokenizer_json, ReadIfThere(folder / "tokenizer.json"));
  if (!files.tokenizer_json) {
    FQ_ASSIGN_OR_RETURN(files.vocab_json, ReadIfThere(folder / "vocab.json"));
    FQ_ASSIGN_OR_RETURN(files.merges_txt, ReadIfThere(folder / "merges.txt"));
    FQ_ASSIGN_OR_RETURN(files.tokenizer_model, ReadIfThere(folder / "tokenizer.model"));
    FQ_ASSIGN_OR_RETURN(files.added_tokens_json, ReadIfThere(folder / "added_tokens.json"));
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = MakeTokenizer(files);
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), dir);
  return tokenizer;
}

}  // namespace flashquant
