// Families differ in white space that matters (inside string literals) and in much that does not
// (quotes, ['content'] or .content, dashes at the brackets). NormalizedTemplate takes away the
// second kind, so that an expression is found by comparing text.
#include "engine/tokenizer/chat_format_layout.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "fmt/format.h"

namespace flashquant {
namespace {

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";
constexpr std::string_view kStrip = ".strip()";
constexpr std::string_view kSpace = " \t\n\r\f\v";

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// A string literal of a template as text: \n and \x for any other x.
std::string Unescaped(std::string_view literal) {
  std::string text;
  for (size_t i = 0; i < literal.size(); ++i) {
    if (literal[i] == '\\' && i + 1 < literal.size()) {
      ++i;
      text.push_back(literal[i] == 'n' ? '\n' : literal[i]);
    } else {
      text.push_back(literal[i]);
    }
  }
  return text;
}

// The string literal that ends at the first unescaped `quote`.
std::string_view UpToQuote(std::string_view text, char quote) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == quote) {
      return text.substr(0, i);
    }
  }
  return text;
}

// Line ends as the template language makes them of a file with CR LF.
std::string WithLineFeeds(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool before_line_feed = i + 1 < text.size() && text[i + 1] == '\n';
    if (text[i] != '\r' || !before_line_feed) result.push_back(text[i]);
  }
  return result;
}

// Appends the code from `pos` (behind its opening bracket) to its closing one, normalized; returns
// the position behind that.
size_t AppendNormalizedCode(std::string_view text, size_t pos, std::string_view close,
                            std::string* out) {
  if (pos < text.size() && (text[pos] == '-' || text[pos] == '+')) ++pos;
  while (pos < text.size()) {
    const std::string_view rest = text.substr(pos);
    const char c = rest.front();
    if (rest.starts_with(close) || (c == '-' && rest.substr(1).starts_with(close))) {
      out->append(close);
      return pos + close.size() + (c == '-' ? 1 : 0);
    }
    if (c == '\'' || c == '"') {
      const std::string_view literal = UpToQuote(rest.substr(1), c);
      pos = std::min(text.size(), pos + literal.size() + 2);
      if (out->ends_with('[') && pos < text.size() && text[pos] == ']') {
        out->back() = '.';
        out->append(literal);
        ++pos;
      } else {
        out->append(fmt::format("\"{}\"", Unescaped(literal)));
      }
      continue;
    }
    if (kSpace.find(c) == std::string_view::npos) out->push_back(c);
    if (out->ends_with(kStrip)) out->replace(out->size() - kStrip.size(), kStrip.size(), "|trim");
    ++pos;
  }
  return pos;
}

// The template with comments dropped and its code without white space and dashes at the brackets;
// literals unescaped between double quotes; x['y'] as x.y; .strip() as |trim.
std::string NormalizedTemplate(std::string_view text) {
  std::string out;
  size_t pos = 0;
  while (pos < text.size()) {
    const std::string_view open = text.substr(pos, 2);
    if (open == "{#") {
      const size_t end = text.find("#}", pos + 2);
      pos = end == std::string_view::npos ? text.size() : end + 2;
    } else if (open == "{{" || open == "{%") {
      out.append(open);
      pos = AppendNormalizedCode(text, pos + 2, open == "{{" ? "}}" : "%}", &out);
    } else {
      out.push_back(text[pos++]);
    }
  }
  return out;
}

// The content in a literal '<|im_start|>system\n...<|im_end|>', which templates have only for a
// conversation without a system message.
std::optional<std::string> FindDefaultSystem(std::string_view text) {
  const std::string start = std::string(kStart) + "system";
  for (size_t pos = text.find(start); pos != std::string_view::npos;
       pos = text.find(start, pos + 1)) {
    if (pos == 0 || (text[pos - 1] != '\'' && text[pos - 1] != '"')) continue;
    const std::string literal =
        Unescaped(UpToQuote(text.substr(pos + start.size()), text[pos - 1]));
    const size_t end = literal.find(kEnd);
    if (end == std::string::npos || literal.front() != '\n') continue;
    return literal.substr(1, end - 1);
  }
  return std::nullopt;
}

bool IsChatMl(std::string_view text) {
  const std::string generation = std::string(kStart) + "assistant";
  const bool has_layout = Contains(text, kEnd) &&
                          (Contains(text, generation + "\\n") || Contains(text, generation + "\n"));
  // Separators of another family; system messages composed from dates and modes.
  for (const char* other : {"<|im_sep|>", "strftime_now", "reasoning_mode"}) {
    if (Contains(text, other)) return false;
  }
  return has_layout;
}

void ReadChatMl(std::string_view text, std::string_view code, ChatLayout* layout) {
  if (!IsChatMl(text)) return;
  const bool drops_reasoning = Contains(code, "message.content.split(\"</think>\")[-1].lstrip(");
  if (!drops_reasoning && Contains(code, "split(\"</think>\")")) return;
  const bool ends_plainly = Contains(code, "{{\"<|im_start|>assistant\n\"}}");
  if (!ends_plainly && Contains(code, "<|im_start|>assistant\n<think>")) {
    if (!Contains(code, "{{\"<|im_start|>assistant\n<think>\n\"}}")) return;
    layout->generation_suffix = "<think>\n";
  }
  layout->kind = ChatLayout::Kind::kChatMl;
  layout->default_system = FindDefaultSystem(text);
  layout->trims_content = Contains(code, "content|trim");
  layout->drops_reasoning = drops_reasoning;
}

// The text between `before` and the next `after`.
std::optional<std::string> Between(std::string_view code, std::string_view before,
                                   std::string_view after) {
  const size_t begin = code.find(before);
  if (begin == std::string_view::npos) return std::nullopt;
  const std::string_view rest = code.substr(begin + before.size());
  const size_t end = rest.find(after);
  if (end == std::string_view::npos) return std::nullopt;
  return std::string(rest.substr(0, end));
}

void ReadLlama3(std::string_view code, ChatLayout* layout) {
  const bool has_generation =
      Contains(code, "\"<|start_header_id|>assistant<|end_header_id|>\n\n\"") ||
      Contains(code, "\"<|start_header_id|>\"+\"assistant\"+\"<|end_header_id|>\n\n\"");
  const std::string message =
      "\"<|start_header_id|>\"+message.role+\"<|end_header_id|>\n\n\"+message.content";
  const bool trims = Contains(code, message + "|trim+\"<|eot_id|>\"");
  if (!has_generation || (!trims && !Contains(code, message + "+\"<|eot_id|>\""))) return;
  if (Contains(code, "<|start_header_id|>system")) {
    // 3.1 and later: two lines in front of every system message. A date of today is left to
    // engines that have a clock for it; the template names the one for others.
    const auto cutoff = Between(code, "{{\"Cutting Knowledge Date: ", "\"}}");
    const auto date = Between(code, "date_string=\"", "\"");
    const bool has_date = Contains(code, "{{\"Today Date: \"+date_string+\"\n\n\"}}");
    const bool has_system = Contains(code, "{{system_message}}") &&
                            Contains(code, "system_message=messages[0].content|trim");
    if (!cutoff || !date || !has_date || !has_system || !trims) return;
    layout->system_preamble =
        fmt::format("Cutting Knowledge Date: {}Today Date: {}\n\n", *cutoff, *date);
  }
  layout->kind = ChatLayout::Kind::kLlama3;
  layout->trims_content = trims;
}

void ReadLlama2(std::string_view code, ChatLayout* layout) {
  if (!Contains(code, "{{bos_token+\"[INST] \"+content|trim+\" [/INST]\"}}") ||
      !Contains(code, "{{\" \"+content|trim+\" \"+eos_token}}")) {
    return;
  }
  // A system message of the template's own, unless its condition is switched off.
  const auto own = Between(code, "setsystem_message=\"", "\"");
  if (own && !own->empty() && !own->starts_with("<<SYS>>") && !Contains(code, "eliffalse==true")) {
    return;
  }
  const auto system = Between(code, "\"<<SYS>>\n\"+", "+\"\n<</SYS>>\n\n\"");
  if (!system) return;
  const bool is_trimmed = system->ends_with("|trim");
  const std::string source = system->substr(0, system->size() - (is_trimmed ? 5 : 0));
  if (source != "system_message" && source != "messages[0].content") return;
  layout->kind = ChatLayout::Kind::kLlama2;
  layout->trims_content = true;
  layout->trims_system = is_trimmed;
  layout->trims_answer = true;
  layout->user_open = "[INST] ";
  layout->user_close = " [/INST]";
  layout->answer_prefix = " ";
  layout->answer_suffix = " ";
  layout->system_place = ChatLayout::SystemPlace::kFirstUser;
  layout->system_prefix = "<<SYS>>\n";
  layout->system_suffix = "\n<</SYS>>\n\n";
}

bool ReadMistralAnswer(std::string_view code, ChatLayout* layout) {
  for (const char* prefix : {"", " "}) {
    for (const bool trims : {false, true}) {
      for (const char* after : {"", " "}) {
        const std::string expression =
            fmt::format("{{{{{}message.content{}+eos_token{}}}}}", *prefix == '\0' ? "" : "\" \"+",
                        trims ? "|trim" : "", *after == '\0' ? "" : "+\" \"");
        if (!Contains(code, expression)) continue;
        layout->answer_prefix = prefix;
        layout->trims_answer = trims;
        layout->after_answer_eos = after;
        return true;
      }
    }
  }
  return false;
}

bool ReadMistralUser(std::string_view code, ChatLayout* layout) {
  for (const char* open : {"[INST]", "[INST] ", " [INST] "}) {
    for (const char* close : {"[/INST]", " [/INST]"}) {
      if (!Contains(code, fmt::format("{{{{\"{}\"+message.content+\"{}\"}}}}", open, close))) {
        continue;
      }
      layout->user_open = open;
      layout->user_close = close;
      return true;
    }
  }
  return false;
}

void ReadMistral(std::string_view code, ChatLayout* layout) {
  if (Contains(code, "<<SYS>>") || !Contains(code, "bos_token")) return;
  if (!ReadMistralUser(code, layout) || !ReadMistralAnswer(code, layout)) return;
  if (Contains(code, "==\"system\"") || Contains(code, "system_message")) {
    const std::string with_system =
        fmt::format("{{{{\"{}\"+system_message+\"\n\n\"+message.content+\"{}\"}}}}",
                    layout->user_open, layout->user_close);
    const bool in_first = Contains(code, "ifloop.firstandsystem_message");
    const bool in_last = Contains(code, "ifloop.lastandsystem_message");
    if (!Contains(code, with_system) || in_first == in_last) return;
    layout->system_place =
        in_first ? ChatLayout::SystemPlace::kFirstUser : ChatLayout::SystemPlace::kLastUser;
    layout->system_suffix = "\n\n";
  }
  layout->kind = ChatLayout::Kind::kMistral;
}

}  // namespace

std::string_view TrimmedContent(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

ChatLayout ReadChatLayout(std::string_view text) {
  const std::string lines = WithLineFeeds(text);
  const std::string code = NormalizedTemplate(lines);
  ChatLayout layout;
  // Each family by the marker that only it has; a template with two of them is none of ours.
  const bool has_chatml = Contains(code, kStart);
  const bool has_llama3 = Contains(code, "<|start_header_id|>");
  const bool has_inst = Contains(code, "[INST]");
  if (has_chatml + has_llama3 + has_inst != 1) return layout;
  if (has_chatml) ReadChatMl(lines, code, &layout);
  if (has_llama3) ReadLlama3(code, &layout);
  if (has_inst) ReadLlama2(code, &layout);
  if (has_inst && layout.kind == ChatLayout::Kind::kUnknown) {
    ReadMistral(code, &layout);
  } else if (ChatLayout other; has_inst && ReadMistralUser(code, &other)) {
    return ChatLayout();  // both, one after the other: which one runs is not told by markers
  }
  if (layout.kind == ChatLayout::Kind::kUnknown) return ChatLayout();
  layout.has_bos = Contains(code, "bos_token");
  layout.alternates = has_inst || Contains(code, "(message.role==\"user\")!=(");
  return layout;
}

std::string DescribeChatMarkers(std::string_view text) {
  constexpr size_t kMaxMarkers = 4;
  constexpr size_t kMaxMarkerBytes = 40;
  std::vector<std::string> markers;
  for (size_t i = 0; i < text.size() && markers.size() < kMaxMarkers; ++i) {
    if (text[i] != '<' && text[i] != '[') continue;
    const char close = text[i] == '<' ? '>' : ']';
    const std::string_view marker = text.substr(i, text.substr(i, kMaxMarkerBytes).find(close) + 1);
    const bool is_marker =
        marker.size() > 2 && marker.back() == close &&
        std::all_of(marker.begin() + 1, marker.end() - 1, [close](char c) {
          const bool is_word = (c >= 'A' && c <= 'Z') || c == '_' || c == '/';
          return is_word || (close == '>' && ((c >= 'a' && c <= 'z') || c == '|'));
        });
    std::string quoted = fmt::format("'{}'", marker);
    if (is_marker && std::find(markers.begin(), markers.end(), quoted) == markers.end()) {
      markers.push_back(std::move(quoted));
    }
  }
  return markers.empty() ? "no markers" : fmt::format("{}", fmt::join(markers, ", "));
}

}  // namespace flashquant
