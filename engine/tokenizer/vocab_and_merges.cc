// Reading the older pair of files, vocab.json and merges.txt: one merge a line, "left right", lines
// that start with "#version" skipped.
#include <utility>

#include "engine/checkpoint/json.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

absl::StatusOr<std::vector<MergeRule>> ParseMerges(std::string_view text) {
  std::vector<MergeRule> merges;
  int64_t line_number = 0;
  while (!text.empty()) {
    const size_t line_end = text.find('\n');
    std::string_view line = text.substr(0, line_end);
    text = line_end == std::string_view::npos ? "" : text.substr(line_end + 1);
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty() || line.substr(0, 8) == "#version") continue;
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || space != line.rfind(' ')) {
      return DataLossError("merges.txt: line {} is not a pair of tokens", line_number);
    }
    if (static_cast<int64_t>(merges.size()) == kMaxMerges) {
      return DataLossError("merges.txt: too many merges (limit {}, got more)", kMaxMerges);
    }
    merges.emplace_back(line.substr(0, space), line.substr(space + 1));
  }
  return merges;
}

}  // namespace

absl::StatusOr<TokenizerParts> ParseVocabAndMerges(std::string_view vocab_json,
                                                   std::string_view merges_txt) {
  constexpr char kVocabFile[] = "vocab.json";
  TokenizerParts parts;
  FQ_ASSIGN_OR_RETURN(const nlohmann::json vocab, ParseJson(vocab_json, kVocabFile));
  FQ_ASSIGN_OR_RETURN(const JsonObject root, JsonObject::Create(vocab, kVocabFile));
  FQ_ASSIGN_OR_RETURN(parts.vocabulary, ParseVocabulary(root.json(), kVocabFile));
  FQ_ASSIGN_OR_RETURN(parts.merges, ParseMerges(merges_txt));
  PreTokenizerStage stage;
  stage.pattern = SplitPattern::kGpt2;
  parts.stages = {stage};
  return parts;
}

}  // namespace flashquant
