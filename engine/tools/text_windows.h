// The text that perplexity and compare score, cut the same way by both: encoded at once without
// special tokens, then non-overlapping windows of `context` tokens from the start; a shorter rest
// is dropped.
#pragma once

#include <cstdint>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"

namespace flashquant {

struct TextWindowFlags {
  std::string text;
  int32_t context = 512;    // tokens per window
  int32_t max_windows = 0;  // 0: all
};

// Adds --text, --context and --max-windows; `flags` must outlive the command's parsing.
void AddTextWindowFlags(CLI::App* command, TextWindowFlags* flags);

// The text, at most 1 GiB. Errors of ReadFile.
absl::StatusOr<std::string> ReadWindowedText(const TextWindowFlags& flags);

// Windows to score of a text of `num_tokens`. INVALID_ARGUMENT when there is not one.
absl::StatusOr<int64_t> NumTextWindows(const TextWindowFlags& flags, size_t num_tokens);

}  // namespace flashquant
