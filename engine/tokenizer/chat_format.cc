// From a layout to tokens. Text between two control tokens is encoded in one piece, as it is when
// a rendered template is encoded.
#include "engine/tokenizer/chat_format.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

using Kind = ChatLayout::Kind;
using SystemPlace = ChatLayout::SystemPlace;

constexpr int64_t kMaxTemplateBytes = int64_t{1} << 20;

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

// Collects a prompt's text until the next control token.
class PromptBuilder final {
 public:
  explicit PromptBuilder(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  void AddText(std::string_view text) { pending_.append(text); }

  void AddToken(int32_t id) {
    Flush();
    ids_.push_back(id);
  }

  // A layout's own text: [INST] and [/INST] are control tokens where the vocabulary has them as
  // such (Mistral from its third tokenizer on), else text.
  void AddMarkers(std::string_view text) {
    for (const std::string_view marker : {"[INST]", "[/INST]"}) {
      const size_t pos = text.find(marker);
      if (pos == std::string_view::npos) continue;
      const std::optional<int32_t> id = tokenizer_->TokenId(marker);
      if (!id || !tokenizer_->IsSpecial(*id)) continue;
      AddText(text.substr(0, pos));
      AddToken(*id);
      text = text.substr(pos + marker.size());
    }
    AddText(text);
  }

  std::vector<int32_t> Finish() {
    Flush();
    return std::move(ids_);
  }

 private:
  void Flush() {
    if (pending_.empty()) return;
    const std::vector<int32_t> added = tokenizer_->Encode(pending_, SpecialText::kPlain);
    ids_.insert(ids_.end(), added.begin(), added.end());
    pending_.clear();
  }

  const Tokenizer* tokenizer_;
  std::string pending_;
  std::vector<int32_t> ids_;
};

struct ControlTokens {
  std::optional<int32_t> bos;
  int32_t start;
  int32_t header_end;
  int32_t end;
};

std::string_view MaybeTrimmed(std::string_view text, bool trims) {
  return trims ? TrimmedContent(text) : text;
}

// An answer without its reasoning: what follows the last </think>.
std::string_view WithoutReasoning(std::string_view answer) {
  constexpr std::string_view kThinkEnd = "</think>";
  const size_t pos = answer.rfind(kThinkEnd);
  if (pos == std::string_view::npos) return answer;
  const std::string_view rest = answer.substr(pos + kThinkEnd.size());
  const size_t begin = rest.find_first_not_of('\n');
  return begin == std::string_view::npos ? std::string_view() : rest.substr(begin);
}

void AddPlain(std::span<const ChatMessage> messages, PromptBuilder* out) {
  for (const ChatMessage& message : messages) {
    out->AddText(fmt::format("{}: {}\n", message.role, message.content));
  }
  out->AddText("assistant:");
}

void AddChatMl(const ChatLayout& layout, const ControlTokens& tokens,
               std::span<const ChatMessage> messages, PromptBuilder* out) {
  const auto add = [&](std::string_view role, std::string_view content) {
    out->AddToken(tokens.start);
    out->AddText(fmt::format("{}\n{}", role, MaybeTrimmed(content, layout.trims_content)));
    out->AddToken(tokens.end);
    out->AddText("\n");
  };
  if (layout.default_system && messages.front().role != "system") {
    add("system", *layout.default_system);
  }
  for (const ChatMessage& message : messages) {
    const bool is_answer = layout.drops_reasoning && message.role == "assistant";
    add(message.role, is_answer ? WithoutReasoning(message.content) : message.content);
  }
  out->AddToken(tokens.start);
  out->AddText("assistant\n" + layout.generation_suffix);
}

void AddLlama3(const ChatLayout& layout, const ControlTokens& tokens,
               std::span<const ChatMessage> messages, PromptBuilder* out) {
  const auto add_header = [&](std::string_view role) {
    out->AddToken(tokens.start);
    out->AddText(role);
    out->AddToken(tokens.header_end);
    out->AddText("\n\n");
  };
  const auto add = [&](std::string_view role, std::string_view preamble, std::string_view content) {
    add_header(role);
    out->AddText(preamble);
    out->AddText(MaybeTrimmed(content, layout.trims_content));
    out->AddToken(tokens.end);
  };
  const bool has_system = messages.front().role == "system";
  if (!layout.system_preamble.empty()) {
    add("system", layout.system_preamble, has_system ? messages.front().content : "");
    if (has_system) messages = messages.subspan(1);
  }
  for (const ChatMessage& message : messages) add(message.role, "", message.content);
  add_header("assistant");
}

// Llama-2 and Mistral: user messages between [INST] and [/INST], answers ended by EOS.
void AddInstructions(const ChatLayout& layout, const ControlTokens& tokens,
                     std::span<const ChatMessage> messages, PromptBuilder* out) {
  std::optional<std::string> system;
  if (messages.front().role == "system") {
    system = layout.system_prefix;
    system->append(MaybeTrimmed(messages.front().content, layout.trims_system));
    system->append(layout.system_suffix);
    messages = messages.subspan(1);
  }
  const size_t system_at = layout.system_place == SystemPlace::kFirstUser ? 0 : messages.size() - 1;
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role == "user") {
      const std::string content =
          (system && i == system_at ? *system : std::string()) + message.content;
      if (layout.kind == Kind::kLlama2 && i > 0 && tokens.bos) out->AddToken(*tokens.bos);
      out->AddMarkers(layout.user_open);
      out->AddText(MaybeTrimmed(content, layout.trims_content));
      out->AddMarkers(layout.user_close);
    } else {
      out->AddText(layout.answer_prefix);
      out->AddText(MaybeTrimmed(message.content, layout.trims_answer));
      out->AddText(layout.answer_suffix);
      out->AddToken(tokens.end);
      out->AddText(layout.after_answer_eos);
    }
  }
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

// False when the tokenizer lacks a control token of the layout.
bool ChatFormat::FindControlTokens() {
  const auto find = [this](std::string_view content, int32_t* id) {
    const std::optional<int32_t> found = tokenizer_->TokenId(content);
    if (found) *id = *found;
    return found.has_value();
  };
  switch (layout_.kind) {
    case Kind::kChatMl:
      return find("<|im_start|>", &start_) && find("<|im_end|>", &end_);
    case Kind::kLlama3:
      return find("<|start_header_id|>", &start_) && find("<|end_header_id|>", &header_end_) &&
             find("<|eot_id|>", &end_);
    case Kind::kLlama2:
    case Kind::kMistral:
      if (tokenizer_->eos()) end_ = *tokenizer_->eos();
      return tokenizer_->eos().has_value();
    case Kind::kPlain:
    case Kind::kUnknown:
      break;
  }
  return false;
}

ChatFormat ChatFormat::FromTemplate(std::optional<std::string_view> text,
                                    const Tokenizer* tokenizer) {
  ChatFormat format(tokenizer);
  if (!text) {
    format.layout_.kind = Kind::kPlain;
    format.bos_ = tokenizer->prompt_bos();
    return format;
  }
  format.layout_ = ReadChatLayout(*text);
  if (!format.FindControlTokens()) {
    const bool is_known = format.kind() != Kind::kUnknown;
    const std::string why =
        is_known ? fmt::format("is {}, but the tokenizer lacks its control tokens", format.name())
                 : fmt::format("has an unknown layout ({})", DescribeChatMarkers(*text));
    format.layout_ = ChatLayout();
    format.supported_ = UnimplementedError(
        "the model's chat template {} (chatml, llama-3, llama-2 and mistral are supported, "
        "plain for models without a template)",
        why);
    return format;
  }
  format.end_of_turn_ids_ = {format.end_};
  if (format.layout_.has_bos) format.bos_ = tokenizer->bos();
  return format;
}

std::string_view ChatFormat::name() const {
  switch (kind()) {
    case Kind::kPlain:
      return "plain";
    case Kind::kChatMl:
      return "chatml";
    case Kind::kLlama3:
      return "llama-3";
    case Kind::kLlama2:
      return "llama-2";
    case Kind::kMistral:
      return "mistral";
    case Kind::kUnknown:
      break;
  }
  return "unknown";
}

absl::Status ChatFormat::CheckMessages(std::span<const ChatMessage> messages) const {
  if (messages.empty()) return InvalidArgumentError("chat.messages: must not be empty");
  const bool is_instruction = kind() == Kind::kLlama2 || kind() == Kind::kMistral;
  const bool has_system = messages.front().role == "system";
  if (is_instruction && has_system && layout_.system_place == SystemPlace::kNone) {
    return InvalidArgumentError(
        "chat.messages[0].role: this model's chat template has no system message");
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    if (role != "system" && role != "user" && role != "assistant") {
      return InvalidArgumentError("chat.messages[{}].role: must be 'system', 'user' or 'assistant'",
                                  i);
    }
    if (!layout_.alternates || (i == 0 && has_system)) continue;
    const char* const expected = (i - (has_system ? 1 : 0)) % 2 == 0 ? "user" : "assistant";
    if (role != expected) {
      return InvalidArgumentError(
          "chat.messages[{}].role: must be '{}' where this model's chat template lets roles "
          "alternate (found '{}')",
          i, expected, role);
    }
  }
  if (is_instruction && messages.back().role != "user") {
    return InvalidArgumentError("chat.messages[{}].role: the last one must be 'user' (found '{}')",
                                messages.size() - 1, messages.back().role);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> ChatFormat::BuildPrompt(
    std::span<const ChatMessage> messages) const {
  FQ_RETURN_IF_ERROR(supported_);
  FQ_RETURN_IF_ERROR(CheckMessages(messages));
  PromptBuilder out(tokenizer_);
  if (bos_) out.AddToken(*bos_);
  const ControlTokens tokens{bos_, start_, header_end_, end_};
  switch (kind()) {
    case Kind::kPlain:
    case Kind::kUnknown:
      AddPlain(messages, &out);
      break;
    case Kind::kChatMl:
      AddChatMl(layout_, tokens, messages, &out);
      break;
    case Kind::kLlama3:
      AddLlama3(layout_, tokens, messages, &out);
      break;
    case Kind::kLlama2:
    case Kind::kMistral:
      AddInstructions(layout_, tokens, messages, &out);
      break;
  }
  return out.Finish();
}

}  // namespace flashquant
