// ChatLayout: what a chat template lays out, read from its text by fixed markers. The template is
// never run: its expressions are compared with those that the known families write, and whatever
// has other ones is kUnknown, so that no conversation is laid out by a guess.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace flashquant {

struct ChatLayout {
  enum class Kind {
    kPlain,    // the model has no template: "role: content" lines, then "assistant:"
    kChatMl,   // <|im_start|>role\ncontent<|im_end|>\n, then <|im_start|>assistant\n
    kLlama3,   // <|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>, then a header
    kLlama2,   // BOS [INST] <<SYS>>\nsystem\n<</SYS>>\n\nuser [/INST] answer EOS, and so on
    kMistral,  // BOS, then [INST]system\n\nuser[/INST]answer EOS, and so on
    kUnknown,  // a template of another layout
  };
  enum class SystemPlace { kNone, kFirstUser, kLastUser };

  Kind kind = Kind::kUnknown;
  bool has_bos = false;        // BOS in front (kLlama2: of every user message)
  bool alternates = false;     // refuses other orders than [system] user assistant user ...
  bool trims_content = false;  // white space of both ends (kLlama2: with the system part in front)
  // kChatMl: system message of a conversation without one.
  std::optional<std::string> default_system;
  bool drops_reasoning =
      false;  // kChatMl: answers before the last question lose their <think> part
  std::string
      generation_suffix;  // kChatMl: behind "assistant\n" of the prompt's end (QwQ: <think>)
  // kLlama3: in front of the system message's text; not empty: every prompt has a system message.
  std::string system_preamble;
  // kLlama2, kMistral: what surrounds the parts, with their white space.
  std::string user_open;
  std::string user_close;
  std::string answer_prefix;
  std::string answer_suffix;     // before EOS
  std::string after_answer_eos;  // after EOS
  bool trims_answer = false;
  SystemPlace system_place = SystemPlace::kNone;
  bool trims_system = false;
  std::string system_prefix;
  std::string system_suffix;
};

// The layout of a template's text (at most 1 MiB is expected; linear in it).
ChatLayout ReadChatLayout(std::string_view text);

// Up to four distinct markers ("<|user|>", "[INST]") of a template, printable and quoted, for
// messages about a layout that is not known: "'<|user|>', '<|end|>'"; "no markers" without any.
std::string DescribeChatMarkers(std::string_view text);

// White space of both ends removed, as the templates' filter does (ASCII suffices here).
std::string_view TrimmedContent(std::string_view text);

}  // namespace flashquant
