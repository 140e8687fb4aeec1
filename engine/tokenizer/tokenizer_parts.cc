// Reading tokenizer.json section by section. Rule of the house: a kind or an option that we do not
// have is refused by its name, never skipped.
#include "engine/tokenizer/tokenizer_parts.h"

#include <utility>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

using Json = nlohmann::json;

constexpr char kFile[] = "tokenizer.json";
constexpr int64_t kMaxListed = 64;  // elements of a Sequence or template
constexpr int64_t kMaxReplacedBytes = 64;

absl::Status Unsupported(std::string_view kind, std::string_view name) {
  return UnimplementedError("{}: tokenizer: unsupported {} '{}'", kFile, kind, PrintableName(name));
}

absl::Status ParseAddedTokens(const JsonObject& root, TokenizerParts* parts) {
  if (!root.Has("added_tokens")) return absl::OkStatus();
  FQ_ASSIGN_OR_RETURN(const Json* list, root.GetArray("added_tokens", AddedTokens::kMaxTokens));
  for (const Json& element : *list) {
    FQ_ASSIGN_OR_RETURN(const JsonObject object,
                        JsonObject::Create(element, fmt::format("{}: added_tokens[{}]", kFile,
                                                                parts->added_tokens.size())));
    FQ_ASSIGN_OR_RETURN(AddedToken token, ParseAddedToken(object, /*is_special=*/false));
    FQ_ASSIGN_OR_RETURN(const int64_t id, object.GetInt("id", 0, kMaxVocabulary - 1));
    token.id = static_cast<int32_t>(id);
    parts->added_tokens.push_back(std::move(token));
  }
  return absl::OkStatus();
}

absl::StatusOr<MergeRule> ParseMerge(const Json& merge, size_t index) {
  if (merge.is_string()) {
    const auto& text = merge.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
      return MergeRule(text.substr(0, space), text.substr(space + 1));
    }
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
             merge[1].is_string()) {
    return MergeRule(merge[0].get<std::string>(), merge[1].get<std::string>());
  }
  return DataLossError("{}: model.merges: merge {} is not a pair of tokens", kFile, index);
}

absl::Status ReadModelOptions(const JsonObject& model, TokenizerParts* parts) {
  FQ_ASSIGN_OR_RETURN(const std::string type, model.GetStringOr("type", "BPE"));
  if (type != "BPE") return Unsupported("model", type);
  FQ_ASSIGN_OR_RETURN(const double dropout, model.GetDoubleOr("dropout", 0, 0, 1));
  if (dropout != 0) return Unsupported("model option", "dropout");
  const bool characters = parts->alphabet == BpeAlphabet::kCharacters;
  FQ_ASSIGN_OR_RETURN(const bool byte_fallback, model.GetBoolOr("byte_fallback", false));
  if (byte_fallback && !characters) return Unsupported("model option", "byte_fallback");
  if (byte_fallback != parts->byte_fallback) return Unsupported("decoder", "(no ByteFallback)");
  FQ_ASSIGN_OR_RETURN(parts->fuse_unk, model.GetBoolOr("fuse_unk", false));
  FQ_ASSIGN_OR_RETURN(parts->unk_token, model.GetStringOr("unk_token", ""));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    FQ_ASSIGN_OR_RETURN(const std::string affix, model.GetStringOr(key, ""));
    if (!affix.empty()) return Unsupported("model option", key);
  }
  return absl::OkStatus();
}

absl::Status ParseModel(const JsonObject& root, TokenizerParts* parts) {
  FQ_ASSIGN_OR_RETURN(const JsonObject model, root.GetObject("model"));
  FQ_RETURN_IF_ERROR(ReadModelOptions(model, parts));
  FQ_ASSIGN_OR_RETURN(parts->ignore_merges, model.GetBoolOr("ignore_merges", false));
  parts->has_unk_token = model.Has("unk_token");
  FQ_ASSIGN_OR_RETURN(const JsonObject vocab, model.GetObject("vocab"));
  FQ_ASSIGN_OR_RETURN(parts->vocabulary, ParseVocabulary(vocab.json(), kFile));
  FQ_ASSIGN_OR_RETURN(const Json* merges, model.GetArray("merges", kMaxMerges));
  parts->merges.reserve(merges->size());
  for (const Json& merge : *merges) {
    FQ_ASSIGN_OR_RETURN(MergeRule rule, ParseMerge(merge, parts->merges.size()));
    parts->merges.push_back(std::move(rule));
  }
  return absl::OkStatus();
}

// The elements of a component: those of a Sequence's list (one level), else itself; none for null.
absl::StatusOr<std::vector<JsonObject>> Elements(const JsonObject& root, const char* kind,
                                                 const char* list_key) {
  std::vector<JsonObject> elements;
  if (!root.Has(kind)) return elements;
  FQ_ASSIGN_OR_RETURN(const JsonObject component, root.GetObject(kind));
  FQ_ASSIGN_OR_RETURN(const std::string type, component.GetString("type"));
  if (type != "Sequence") {
    elements.push_back(component);
    return elements;
  }
  FQ_ASSIGN_OR_RETURN(const Json* list, component.GetArray(list_key, kMaxListed));
  for (const Json& element : *list) {
    FQ_ASSIGN_OR_RETURN(
        JsonObject object,
        JsonObject::Create(element, fmt::format("{}: {}[{}]", kFile, kind, elements.size())));
    elements.push_back(std::move(object));
  }
  return elements;
}

absl::StatusOr<PreTokenizerStage> ParseSplit(const JsonObject& object) {
  PreTokenizerStage stage;
  stage.kind = PreTokenizerStage::Kind::kSplit;
  FQ_ASSIGN_OR_RETURN(const JsonObject pattern, object.GetObject("pattern"));
  if (!pattern.Has("Regex")) return Unsupported("pre_tokenizer", "Split by String");
  FQ_ASSIGN_OR_RETURN(const std::string regex, pattern.GetString("Regex"));
  const std::optional<SplitPattern> known = KnownSplitPattern(regex);
  if (!known) return Unsupported("pre_tokenizer", "Split by " + regex);
  FQ_ASSIGN_OR_RETURN(const std::string behavior, object.GetString("behavior"));
  FQ_ASSIGN_OR_RETURN(const bool invert, object.GetBoolOr("invert", false));
  // The known patterns match every character, so removing what is between matches removes nothing.
  const bool isolates = (behavior == "Isolated" && !invert) || (behavior == "Removed" && invert);
  if (!isolates) return Unsupported("pre_tokenizer", "Split " + behavior);
  stage.pattern = *known;
  return stage;
}

// A vocabulary of characters: no stages, or one Metaspace.
absl::Status ParseMetaspace(const std::vector<JsonObject>& elements, TokenizerParts* parts) {
  using Prepend = PreTokenizerStage::Prepend;
  for (const JsonObject& element : elements) {
    FQ_ASSIGN_OR_RETURN(const std::string type, element.GetString("type"));
    if (type != "Metaspace") return Unsupported("pre_tokenizer", type);
    if (!parts->stages.empty()) return Unsupported("pre_tokenizer", "Metaspace after Metaspace");
    PreTokenizerStage stage;
    stage.kind = PreTokenizerStage::Kind::kMetaspace;
    FQ_ASSIGN_OR_RETURN(const std::string replacement,
                        element.GetStringOr("replacement", std::string(kVisibleSpace)));
    if (replacement != kVisibleSpace)
      return Unsupported("pre_tokenizer", "Metaspace " + replacement);
    // "add_prefix_space" is the older spelling.
    FQ_ASSIGN_OR_RETURN(const bool adds, element.GetBoolOr("add_prefix_space", true));
    FQ_ASSIGN_OR_RETURN(const std::string scheme,
                        element.GetStringOr("prepend_scheme", adds ? "always" : "never"));
    if (scheme != "always" && scheme != "first" && scheme != "never") {
      return Unsupported("pre_tokenizer", "Metaspace prepend_scheme " + scheme);
    }
    stage.prepend = scheme == "always"  ? Prepend::kAlways
                    : scheme == "first" ? Prepend::kFirst
                                        : Prepend::kNever;
    FQ_ASSIGN_OR_RETURN(stage.split, element.GetBoolOr("split", true));
    parts->stages.push_back(stage);
  }
  return absl::OkStatus();
}

absl::Status ParsePreTokenizer(const JsonObject& root, TokenizerParts* parts) {
  FQ_ASSIGN_OR_RETURN(const std::vector<JsonObject> elements,
                      Elements(root, "pre_tokenizer", "pretokenizers"));
  if (parts->alphabet == BpeAlphabet::kCharacters) return ParseMetaspace(elements, parts);
  bool byte_level = false;
  for (const JsonObject& element : elements) {
    FQ_ASSIGN_OR_RETURN(const std::string type, element.GetString("type"));
    // ByteLevel replaces the characters by its alphabet: what came after would see those.
    if (byte_level) return Unsupported("pre_tokenizer", type + " after ByteLevel");
    PreTokenizerStage stage;
    if (type == "ByteLevel") {
      byte_level = true;
      FQ_ASSIGN_OR_RETURN(const bool use_regex, element.GetBoolOr("use_regex", true));
      FQ_ASSIGN_OR_RETURN(stage.add_prefix_space, element.GetBoolOr("add_prefix_space", true));
      stage.pattern = use_regex ? SplitPattern::kGpt2 : SplitPattern::kNone;
    } else if (type == "Digits") {
      stage.kind = PreTokenizerStage::Kind::kDigits;
      FQ_ASSIGN_OR_RETURN(stage.individual_digits, element.GetBoolOr("individual_digits", false));
    } else if (type == "Split") {
      FQ_ASSIGN_OR_RETURN(stage, ParseSplit(element));
    } else {
      return Unsupported("pre_tokenizer", type);
    }
    parts->stages.push_back(stage);
  }
  if (!byte_level) return Unsupported("pre_tokenizer", "(no ByteLevel)");
  if (parts->stages.size() > PreTokenizer::kMaxStages) {
    return DataLossError("{}: pre_tokenizer: too many elements (limit {}, got {})", kFile,
                         PreTokenizer::kMaxStages, parts->stages.size());
  }
  return absl::OkStatus();
}

// {"String": "x"} of a Replace.
absl::StatusOr<std::string> ParsePattern(const JsonObject& object, const char* kind) {
  FQ_ASSIGN_OR_RETURN(const JsonObject pattern, object.GetObject("pattern"));
  if (!pattern.Has("String")) return Unsupported(kind, "Replace by Regex");
  FQ_ASSIGN_OR_RETURN(std::string text, pattern.GetString("String", kMaxReplacedBytes));
  if (text.empty()) return Unsupported(kind, "Replace of nothing");
  return text;
}

absl::Status ParseNormalizer(const JsonObject& root, TokenizerParts* parts) {
  FQ_ASSIGN_OR_RETURN(const std::vector<JsonObject> elements,
                      Elements(root, "normalizer", "normalizers"));
  for (const JsonObject& element : elements) {
    FQ_ASSIGN_OR_RETURN(const std::string type, element.GetString("type"));
    NormalizerStage stage;
    if (type == "NFC") {
      stage.kind = NormalizerStage::Kind::kNfc;
    } else if (type == "Prepend") {
      stage.kind = NormalizerStage::Kind::kPrepend;
      FQ_ASSIGN_OR_RETURN(stage.content, element.GetString("prepend", kMaxReplacedBytes));
    } else if (type == "Replace") {
      stage.kind = NormalizerStage::Kind::kReplace;
      FQ_ASSIGN_OR_RETURN(stage.pattern, ParsePattern(element, "normalizer"));
      FQ_ASSIGN_OR_RETURN(stage.content, element.GetString("content", kMaxReplacedBytes));
    } else {
      return Unsupported("normalizer", type);
    }
    parts->normalizer.push_back(std::move(stage));
  }
  return absl::OkStatus();
}

// The decoder tells the alphabet: ByteLevel alone, or the parts of a sentencepiece decoder, of
// which the Strip of a text's first space is the reader's business.
absl::Status ParseDecoder(const JsonObject& root, TokenizerParts* parts) {
  FQ_ASSIGN_OR_RETURN(const std::vector<JsonObject> decoders,
                      Elements(root, "decoder", "decoders"));
  if (decoders.empty()) return Unsupported("decoder", "(none)");
  FQ_ASSIGN_OR_RETURN(const std::string first, decoders.front().GetString("type"));
  const bool bytes = first == "ByteLevel";
  parts->alphabet = bytes ? BpeAlphabet::kBytes : BpeAlphabet::kCharacters;
  for (const JsonObject& decoder : decoders) {
    FQ_ASSIGN_OR_RETURN(const std::string type, decoder.GetString("type"));
    if (bytes ? type == "ByteLevel" : type == "Fuse") continue;
    if (bytes) return Unsupported("decoder", type);
    if (type == "ByteFallback") {
      parts->byte_fallback = true;
    } else if ((type == "Replace" || type == "Metaspace") && parts->shown_pattern.empty()) {
      parts->shown_pattern = kVisibleSpace;
      parts->shown_content = " ";
      if (type == "Metaspace") continue;
      FQ_ASSIGN_OR_RETURN(parts->shown_pattern, ParsePattern(decoder, "decoder"));
      FQ_ASSIGN_OR_RETURN(parts->shown_content, decoder.GetString("content", kMaxReplacedBytes));
    } else if (type == "Strip") {
      FQ_ASSIGN_OR_RETURN(const std::string content, decoder.GetStringOr("content", " "));
      FQ_ASSIGN_OR_RETURN(const int64_t stop, decoder.GetIntOr("stop", 0, 0, kMaxListed));
      if (content != " " || stop != 0) return Unsupported("decoder", "Strip of '" + content + "'");
    } else {
      return Unsupported("decoder", type);
    }
  }
  return absl::OkStatus();
}

// A template for one text: optionally one special token, then the text.
absl::Status ParseTemplate(const JsonObject& processor, TokenizerParts* parts) {
  FQ_ASSIGN_OR_RETURN(const Json* single, processor.GetArray("single", kMaxListed));
  parts->has_template = true;
  bool text_seen = false;
  for (const Json& element : *single) {
    FQ_ASSIGN_OR_RETURN(
        const JsonObject object,
        JsonObject::Create(element, fmt::format("{}: post_processor: single", kFile)));
    if (object.Has("Sequence")) {
      if (text_seen) return Unsupported("post_processor", "template with two texts");
      text_seen = true;
      continue;
    }
    FQ_ASSIGN_OR_RETURN(const JsonObject token, object.GetObject("SpecialToken"));
    FQ_ASSIGN_OR_RETURN(const std::string name, token.GetString("id"));
    if (text_seen) return Unsupported("post_processor", "template with a token after the text");
    if (parts->template_bos) return Unsupported("post_processor", "template with two tokens");
    FQ_ASSIGN_OR_RETURN(const JsonObject tokens, processor.GetObject("special_tokens"));
    FQ_ASSIGN_OR_RETURN(const JsonObject entry, tokens.GetObject(name));
    FQ_ASSIGN_OR_RETURN(const Json* ids, entry.GetArray("ids", kMaxListed));
    if (ids->size() != 1 || !(*ids)[0].is_number_integer()) {
      return entry.Error("ids", "must be one token id");
    }
    const auto id = (*ids)[0].get<int64_t>();
    if (id < 0 || id >= kMaxVocabulary) return entry.Error("ids", "out of range");
    parts->template_bos = static_cast<int32_t>(id);
  }
  return absl::OkStatus();
}

absl::Status ParsePostProcessor(const JsonObject& root, TokenizerParts* parts) {
  FQ_ASSIGN_OR_RETURN(const std::vector<JsonObject> elements,
                      Elements(root, "post_processor", "processors"));
  for (const JsonObject& element : elements) {
    FQ_ASSIGN_OR_RETURN(const std::string type, element.GetString("type"));
    if (type == "ByteLevel") continue;  // only trims offsets
    if (type != "TemplateProcessing") return Unsupported("post_processor", type);
    if (parts->has_template) return Unsupported("post_processor", "two templates");
    FQ_RETURN_IF_ERROR(ParseTemplate(element, parts));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<VocabularyEntry>> ParseVocabulary(const Json& vocab,
                                                             const std::string& file) {
  if (static_cast<int64_t>(vocab.size()) > kMaxVocabulary) {
    return DataLossError("{}: model.vocab: too many tokens (limit {}, got {})", file,
                         kMaxVocabulary, vocab.size());
  }
  std::vector<VocabularyEntry> entries;
  entries.reserve(vocab.size());
  for (const auto& [content, value] : vocab.items()) {
    if (!value.is_number_integer()) {
      return DataLossError("{}: model.vocab: {}: id must be an integer", file,
                           PrintableName(content));
    }
    const auto id = value.get<int64_t>();
    if (id < 0 || id >= kMaxVocabulary) {
      return DataLossError("{}: model.vocab: {}: id out of range (limit {}, got {})", file,
                           PrintableName(content), kMaxVocabulary, id);
    }
    entries.push_back({content, static_cast<int32_t>(id)});
  }
  return entries;
}

absl::StatusOr<TokenizerParts> ParseTokenizerJson(std::string_view text) {
  FQ_ASSIGN_OR_RETURN(const Json json, ParseJson(text, kFile));
  FQ_ASSIGN_OR_RETURN(const JsonObject root, JsonObject::Create(json, kFile));
  TokenizerParts parts;
  // Kinds first: a tokenizer of another family is called unsupported, not broken.
  FQ_RETURN_IF_ERROR(ParseNormalizer(root, &parts));
  FQ_RETURN_IF_ERROR(ParseDecoder(root, &parts));
  FQ_RETURN_IF_ERROR(ParsePreTokenizer(root, &parts));
  FQ_RETURN_IF_ERROR(ParseModel(root, &parts));
  FQ_RETURN_IF_ERROR(ParseAddedTokens(root, &parts));
  FQ_RETURN_IF_ERROR(ParsePostProcessor(root, &parts));
  return parts;
}

}  // namespace flashquant
