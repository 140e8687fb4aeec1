// The text that perplexity and compare score, cut the same way by both: encoded at once without
// special tokens, then windows of `context` tokens, each `stride` after the last; a shorter rest is
// dropped. Each token is scored once, in the first window that has it (but for the first token of
// a window that overlaps no earlier one), so a smaller stride means more tokens before it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"

namespace flashquant {

struct TextWindowFlags {
  std::string text;
  int32_t context = 512;    // tokens per window
  int32_t stride = 0;       // at most context; 0: context
  int32_t max_windows = 0;  // 0: all

  int32_t distance() const { return stride > 0 ? stride : context; }  // of windows' beginnings
};

struct TextWindow {
  std::span<const int32_t> tokens;
  int32_t first_scored = 1;  // tokens first_scored.. are scored

  int64_t num_scored() const { return static_cast<int64_t>(tokens.size()) - first_scored; }
};

// Adds --text, --context, --stride and --max-windows; `flags` must outlive the command's parsing.
void AddTextWindowFlags(CLI::App* command, TextWindowFlags* flags);

// The text, at most 1 GiB. Errors of ReadFile.
absl::StatusOr<std::string> ReadWindowedText(const TextWindowFlags& flags);

// The windows to score, which view `tokens`. INVALID_ARGUMENT when there is not one, and for a
// stride above the context.
absl::StatusOr<std::vector<TextWindow>> CutTextWindows(const TextWindowFlags& flags,
                                                       std::span<const int32_t> tokens);

}  // namespace flashquant
