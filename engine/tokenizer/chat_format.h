// ChatFormat: the messages of a conversation as prompt tokens, in the layout that the model was
// tuned on. A fixed list of layouts, chosen by markers in the model's chat template; the template
// itself is never run (template engines in servers have been a way to run foreign code).
//
// Control tokens are put in by id; roles and contents are always plain text, so a content that
// spells a control token cannot end a message.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/tokenizer.h"

namespace flashquant {

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

// Immutable; any thread. Refers to the tokenizer, which must outlive it.
class ChatFormat final {
 public:
  enum class Kind {
    kPlain,    // the model has no template: "role: content" lines, then "assistant:"
    kChatMl,   // <|im_start|>role\ncontent<|im_end|>\n, then <|im_start|>assistant\n
    kUnknown,  // the model has a template of another layout: BuildPrompt refuses
  };

  // By the template in `dir`: chat_template.jinja, else tokenizer_config.json's chat_template.
  // DATA_LOSS when a file is broken.
  static absl::StatusOr<ChatFormat> Load(const std::string& dir, const Tokenizer* tokenizer);
  // By the template's text; nullopt: none.
  static ChatFormat FromTemplate(std::optional<std::string_view> text, const Tokenizer* tokenizer);

  Kind kind() const { return kind_; }
  // "plain", "chatml" or "unknown".
  std::string_view name() const;
  // System message that the template adds to a conversation without one (SmolLM2, Qwen2.5).
  const std::optional<std::string>& default_system() const { return default_system_; }

  // The prompt, BOS included where the layout has one, ending where the assistant's answer starts.
  // INVALID_ARGUMENT naming the field for no message or an unknown role; UNIMPLEMENTED for
  // kUnknown.
  absl::StatusOr<std::vector<int32_t>> BuildPrompt(std::span<const ChatMessage> messages) const;

  // Tokens that end the assistant's turn: end tokens of a chat answer besides the model's own.
  const std::vector<int32_t>& end_of_turn_ids() const { return end_of_turn_ids_; }

 private:
  explicit ChatFormat(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}
  void AppendText(std::string_view text, std::vector<int32_t>* ids) const;
  void AppendChatMl(std::string_view role, std::string_view content,
                    std::vector<int32_t>* ids) const;

  const Tokenizer* tokenizer_;
  Kind kind_ = Kind::kPlain;
  std::optional<std::string> default_system_;
  bool trims_content_ = false;
  std::optional<int32_t> bos_;
  int32_t im_start_ = 0;
  int32_t im_end_ = 0;
  std::vector<int32_t> end_of_turn_ids_;
};

}  // namespace flashquant
