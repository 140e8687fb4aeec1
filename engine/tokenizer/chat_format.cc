// Only what templates of the ChatML family differ in is read from their text: a default system
// message, a BOS in front, contents trimmed. A template with logic beyond that is kUnknown.
#include "engine/tokenizer/chat_format.h"

#include <filesystem>
#include <utility>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";
constexpr int64_t kMaxTemplateBytes = int64_t{1} << 20;

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

// The content in a literal '<|im_start|>system\n…<|im_end|>', which templates have only for a
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

bool TrimsContent(std::string_view text) {
  std::string compact;
  for (const char c : text) {
    if (c != ' ' && c != '\'' && c != '"' && c != ']') compact.push_back(c);
  }
  return Contains(compact, "content|trim");
}

// As the filter of the template language: white space of both ends (ASCII suffices here).
std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\r\f\v";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
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

// "chat_template" is a text, or a list of named ones of which "default" counts.
absl::StatusOr<std::optional<std::string>> TemplateOfConfig(const std::string& path) {
  const absl::StatusOr<nlohmann::json> json = ReadJsonFile(path);
  if (absl::IsNotFound(json.status())) return std::optional<std::string>();
  FQ_RETURN_IF_ERROR(json.status());
  FQ_ASSIGN_OR_RETURN(const JsonObject config, JsonObject::Create(*json, path));
  const nlohmann::json* value = config.Find("chat_template");
  if (value == nullptr) return std::optional<std::string>();
  if (value->is_string()) return std::optional(value->get<std::string>());
  if (!value->is_array()) return config.Error("chat_template", "must be a text or a list");
  for (const nlohmann::json& element : *value) {
    FQ_ASSIGN_OR_RETURN(const JsonObject named,
                        JsonObject::Create(element, path + ": chat_template"));
    FQ_ASSIGN_OR_RETURN(const std::string name, named.GetString("name"));
    FQ_ASSIGN_OR_RETURN(std::string text, named.GetString("template", kMaxTemplateBytes));
    if (name == "default") return std::optional(std::move(text));
  }
  return std::optional<std::string>();
}

}  // namespace

absl::StatusOr<ChatFormat> ChatFormat::Load(const std::string& dir, const Tokenizer* tokenizer) {
  const std::filesystem::path folder(dir);
  const absl::StatusOr<std::string> file =
      ReadFile((folder / "chat_template.jinja").string(), kMaxTemplateBytes);
  if (file.ok()) return FromTemplate(*file, tokenizer);
  if (!absl::IsNotFound(file.status())) return file.status();
  FQ_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                      TemplateOfConfig((folder / "tokenizer_config.json").string()));
  return FromTemplate(text, tokenizer);
}

ChatFormat ChatFormat::FromTemplate(std::optional<std::string_view> text,
                                    const Tokenizer* tokenizer) {
  ChatFormat format(tokenizer);
  if (!text) {
    format.bos_ = tokenizer->prompt_bos();
    return format;
  }
  const std::string layout = WithLineFeeds(*text);
  const std::optional<int32_t> start = tokenizer->TokenId(kStart);
  const std::optional<int32_t> end = tokenizer->TokenId(kEnd);
  if (!start || !end || !IsChatMl(layout)) {
    format.kind_ = Kind::kUnknown;
    return format;
  }
  format.kind_ = Kind::kChatMl;
  format.im_start_ = *start;
  format.im_end_ = *end;
  format.end_of_turn_ids_ = {*end};
  format.default_system_ = FindDefaultSystem(layout);
  format.trims_content_ = TrimsContent(layout);
  if (Contains(layout, "bos_token")) format.bos_ = tokenizer->bos();
  return format;
}

std::string_view ChatFormat::name() const {
  switch (kind_) {
    case Kind::kPlain:
      return "plain";
    case Kind::kChatMl:
      return "chatml";
    case Kind::kUnknown:
      break;
  }
  return "unknown";
}

void ChatFormat::AppendText(std::string_view text, std::vector<int32_t>* ids) const {
  const std::vector<int32_t> added = tokenizer_->Encode(text, SpecialText::kPlain);
  ids->insert(ids->end(), added.begin(), added.end());
}

void ChatFormat::AppendChatMl(std::string_view role, std::string_view content,
                              std::vector<int32_t>* ids) const {
  ids->push_back(im_start_);
  AppendText(fmt::format("{}\n{}", role, trims_content_ ? Trimmed(content) : content), ids);
  ids->push_back(im_end_);
  AppendText("\n", ids);
}

absl::StatusOr<std::vector<int32_t>> ChatFormat::BuildPrompt(
    std::span<const ChatMessage> messages) const {
  if (kind_ == Kind::kUnknown) {
    return UnimplementedError("chat: the layout of this model's chat template is not supported");
  }
  if (messages.empty()) return InvalidArgumentError("chat.messages: must not be empty");
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    if (role != "system" && role != "user" && role != "assistant") {
      return InvalidArgumentError("chat.messages[{}].role: must be 'system', 'user' or 'assistant'",
                                  i);
    }
  }
  std::vector<int32_t> ids;
  if (bos_) ids.push_back(*bos_);
  if (kind_ == Kind::kPlain) {
    std::string text;
    for (const ChatMessage& message : messages) {
      text += fmt::format("{}: {}\n", message.role, message.content);
    }
    AppendText(text + "assistant:", &ids);
    return ids;
  }
  if (default_system_ && messages.front().role != "system") {
    AppendChatMl("system", *default_system_, &ids);
  }
  for (const ChatMessage& message : messages) AppendChatMl(message.role, message.content, &ids);
  ids.push_back(im_start_);
  AppendText("assistant\n", &ids);
  return ids;
}

}  // namespace flashquant
