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

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/tokenizer/chat_format_layout.h"
#include "engine/tokenizer/tokenizer.h"

namespace flashquant {

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

// Immutable; any thread. Refers to the tokenizer, which must outlive it.
class ChatFormat final {
 public:
  using Kind = ChatLayout::Kind;

  // By the template in `dir`: chat_template.jinja, else tokenizer_config.json's chat_template.
  // DATA_LOSS when a file is broken.
  static absl::StatusOr<ChatFormat> Load(const std::string& dir, const Tokenizer* tokenizer);
  // By the template's text; nullopt: none.
  static ChatFormat FromTemplate(std::optional<std::string_view> text, const Tokenizer* tokenizer);

  Kind kind() const { return layout_.kind; }
  // "plain", "chatml", "llama-3", "llama-2", "mistral" or "unknown".
  std::string_view name() const;
  // System message that the template adds to a conversation without one (SmolLM2, Qwen2.5).
  const std::optional<std::string>& default_system() const { return layout_.default_system; }
  // OK, or for kUnknown the UNIMPLEMENTED error of BuildPrompt: names the template by its markers
  // and the layouts that there are.
  const absl::Status& supported() const { return supported_; }

  // The prompt, BOS included where the layout has one, ending where the assistant's answer starts.
  // INVALID_ARGUMENT naming the field for no message, an unknown role, or an order of roles that
  // the template refuses; UNIMPLEMENTED for kUnknown.
  absl::StatusOr<std::vector<int32_t>> BuildPrompt(std::span<const ChatMessage> messages) const;

  // Tokens that end the assistant's turn: end tokens of a chat answer besides the model's own.
  const std::vector<int32_t>& end_of_turn_ids() const { return end_of_turn_ids_; }

 private:
  explicit ChatFormat(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}
  bool FindControlTokens();
  absl::Status CheckMessages(std::span<const ChatMessage> messages) const;

  const Tokenizer* tokenizer_;
  ChatLayout layout_;
  absl::Status supported_;
  std::optional<int32_t> bos_;
  int32_t start_ = 0;       // <|im_start|>, <|start_header_id|>
  int32_t header_end_ = 0;  // <|end_header_id|>
  int32_t end_ = 0;         // <|im_end|>, <|eot_id|>, EOS
  std::vector<int32_t> end_of_turn_ids_;
};

}  // namespace flashquant
