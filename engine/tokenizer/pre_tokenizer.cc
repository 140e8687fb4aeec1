// Each pattern is an ordered list of alternatives; a function per pattern tries them at one place
// and returns where the match ends. Every alternative costs at most the run of white space or the
// piece that it looks at, and that run is then consumed, so a whole text costs linear time.
#include "engine/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "engine/base/split_patterns.h"
#include "engine/tokenizer/normalizer.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr std::string_view kGpt2Regex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr uint8_t kLetter = UnicodeClasses::kLetter;
constexpr uint8_t kNumber = UnicodeClasses::kNumber;
constexpr uint8_t kSpace = UnicodeClasses::kSpace;

bool IsLineEnd(char c) { return c == '\r' || c == '\n'; }

// Matches alternatives at a place of one text.
class Matcher final {
 public:
  Matcher(std::string_view text, const UnicodeClasses* classes) : text_(text), classes_(classes) {}

  // End of the match of GPT-2's pattern at `pos`.
  size_t Gpt2(size_t pos) const {
    if (const size_t end = Contraction(pos, /*any_case=*/false); end != pos) return end;
    const size_t start = text_[pos] == ' ' && pos + 1 < text_.size() ? pos + 1 : pos;
    const uint8_t kind = ClassAt(start);
    if (kind & kLetter) return Run(start, kLetter);
    if (kind & kNumber) return Run(start, kNumber);
    if (!(kind & kSpace)) return RunOfOthers(start);
    return WhiteSpace(pos);
  }

  // The same for Llama 3's and Qwen2's, which differ in how many digits stay together.
  size_t Llama3(size_t pos, int max_digits) const {
    if (const size_t end = Contraction(pos, /*any_case=*/true); end != pos) return end;
    const DecodedChar first = DecodeUtf8(text_, pos);
    const uint8_t kind = classes_->Of(first);
    if (kind & kLetter) return Run(pos, kLetter);
    const size_t second = pos + first.num_bytes;
    const bool joins_letters = !(kind & kNumber) && !IsLineEnd(text_[pos]);
    if (joins_letters && second < text_.size() && (ClassAt(second) & kLetter)) {
      return Run(second, kLetter);
    }
    if (kind & kNumber) return Run(pos, kNumber, max_digits);
    const size_t start = text_[pos] == ' ' && second < text_.size() ? second : pos;
    if (!(ClassAt(start) & (kLetter | kNumber | kSpace))) {
      size_t end = RunOfOthers(start);
      while (end < text_.size() && IsLineEnd(text_[end])) ++end;
      return end;
    }
    if (const size_t end = AfterLastLineEnd(pos); end != pos) return end;
    return WhiteSpace(pos);
  }

 private:
  uint8_t ClassAt(size_t pos) const { return classes_->Of(DecodeUtf8(text_, pos)); }

  // 's 't 're 've 'm 'll 'd; `pos` when there is none.
  size_t Contraction(size_t pos, bool any_case) const {
    if (text_[pos] != '\'' || pos + 1 >= text_.size()) return pos;
    // The long s (U+017F) folds to s.
    if (any_case && text_.substr(pos + 1, 2) == "\xC5\xBF") return pos + 3;
    const auto at = [&](size_t i) {
      const char c = i < text_.size() ? text_[i] : '\0';
      return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
    };
    const char a = at(pos + 1);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return pos + 2;
    const char b = at(pos + 2);
    const bool two = (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l');
    return two ? pos + 3 : pos;
  }

  // End of the run, at most `max_chars` long, of characters having `wanted`.
  size_t Run(size_t pos, uint8_t wanted, int max_chars = -1) const {
    while (pos < text_.size() && max_chars != 0) {
      const DecodedChar c = DecodeUtf8(text_, pos);
      if (!(classes_->Of(c) & wanted)) break;
      pos += c.num_bytes;
      --max_chars;
    }
    return pos;
  }

  // End of the run of characters that are neither letter, number nor white space.
  size_t RunOfOthers(size_t pos) const {
    while (pos < text_.size()) {
      const DecodedChar c = DecodeUtf8(text_, pos);
      if (classes_->Of(c) & (kLetter | kNumber | kSpace)) break;
      pos += c.num_bytes;
    }
    return pos;
  }

  // \s*[\r\n]+ at `pos`: past the last line end of the run of white space, `pos` without one.
  size_t AfterLastLineEnd(size_t pos) const {
    const size_t run_end = Run(pos, kSpace);
    size_t end = run_end;
    while (end > pos && !IsLineEnd(text_[end - 1])) --end;
    return end;
  }

  // \s+(?!\S)|\s+ at `pos`, a white space: the run, without its last character where something
  // follows (unless it is the only one).
  size_t WhiteSpace(size_t pos) const {
    size_t last = pos;
    size_t end = pos;
    while (end < text_.size()) {
      const DecodedChar c = DecodeUtf8(text_, end);
      if (!(classes_->Of(c) & kSpace)) break;
      last = end;
      end += c.num_bytes;
    }
    return end == text_.size() || last == pos ? end : last;
  }

  std::string_view text_;
  const UnicodeClasses* classes_;
};

void SplitByPattern(std::string_view text, SplitPattern pattern, const UnicodeClasses* classes,
                    const PreTokenizer::Sink& sink) {
  const Matcher matcher(text, classes);
  size_t pos = 0;
  while (pos < text.size()) {
    const size_t end = pattern == SplitPattern::kGpt2
                           ? matcher.Gpt2(pos)
                           : matcher.Llama3(pos, pattern == SplitPattern::kLlama3 ? 3 : 1);
    sink(text.substr(pos, end - pos));
    pos = end;
  }
}

}  // namespace

std::optional<SplitPattern> KnownSplitPattern(std::string_view regex) {
  if (regex == kGpt2Regex) return SplitPattern::kGpt2;
  if (regex == kLlama3SplitRegex) return SplitPattern::kLlama3;
  if (regex == kQwen2Regex) return SplitPattern::kQwen2;
  return std::nullopt;
}

absl::StatusOr<PreTokenizer> PreTokenizer::Create(std::vector<PreTokenizerStage> stages) {
  if (stages.size() > kMaxStages) {
    return InvalidArgumentError("pre_tokenizer: too many stages (limit {}, got {})", kMaxStages,
                                stages.size());
  }
  FQ_ASSIGN_OR_RETURN(const UnicodeClasses* classes, UnicodeClasses::Get());
  return PreTokenizer(std::move(stages), classes);
}

void PreTokenizer::Split(std::string_view text, bool at_start, const Sink& sink) const {
  if (text.empty()) return;
  if (!stages_.empty() && stages_.front().kind == PreTokenizerStage::Kind::kMetaspace) {
    SplitMetaspace(stages_.front(), text, at_start, sink);
    return;
  }
  RunStage(0, text, sink);
}

void PreTokenizer::SplitMetaspace(const PreTokenizerStage& stage, std::string_view text,
                                  bool at_start, const Sink& sink) {
  std::string marked = ReplaceAll(text, " ", kVisibleSpace);
  const bool prepends = stage.prepend == PreTokenizerStage::Prepend::kAlways ||
                        (stage.prepend == PreTokenizerStage::Prepend::kFirst && at_start);
  if (prepends && marked.compare(0, kVisibleSpace.size(), kVisibleSpace) != 0) {
    marked.insert(0, kVisibleSpace);
  }
  const std::string_view all = marked;
  if (!stage.split) {
    sink(all);
    return;
  }
  for (size_t pos = 0; pos < all.size();) {
    const size_t end = std::min(all.find(kVisibleSpace, pos + 1), all.size());
    sink(all.substr(pos, end - pos));
    pos = end;
  }
}

// Recurses over stages (at most kMaxStages), never over text.
void PreTokenizer::RunStage(size_t stage, std::string_view piece, const Sink& sink) const {
  if (stage == stages_.size()) {
    sink(piece);
    return;
  }
  const PreTokenizerStage& rule = stages_[stage];
  const Sink next = [&](std::string_view part) { RunStage(stage + 1, part, sink); };
  std::string prefixed;
  if (rule.add_prefix_space && piece.front() != ' ') {
    prefixed.reserve(piece.size() + 1);
    prefixed.append(" ").append(piece);
    piece = prefixed;
  }
  if (rule.kind == PreTokenizerStage::Kind::kDigits) {
    SplitDigits(piece, rule.individual_digits, next);
  } else if (rule.pattern != SplitPattern::kNone) {
    SplitByPattern(piece, rule.pattern, classes_, next);
  } else {
    next(piece);
  }
}

void PreTokenizer::SplitDigits(std::string_view text, bool individual, const Sink& sink) const {
  size_t start = 0;
  bool in_number = false;
  for (size_t pos = 0; pos < text.size();) {
    const DecodedChar c = DecodeUtf8(text, pos);
    const bool number = (classes_->Of(c) & kNumber) != 0;
    const bool cut = number != in_number || (number && individual);
    if (cut && pos > start) {
      sink(text.substr(start, pos - start));
      start = pos;
    }
    in_number = number;
    pos += c.num_bytes;
  }
  sink(text.substr(start));
}

}  // namespace flashquant
