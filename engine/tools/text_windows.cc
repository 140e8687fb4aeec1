// See text_windows.h.
#include "engine/tools/text_windows.h"

#include <algorithm>
#include <limits>

#include "engine/checkpoint/file_reader.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

}  // namespace

void AddTextWindowFlags(CLI::App* command, TextWindowFlags* flags) {
  command->add_option("--text", flags->text, "text file")->required();
  command->add_option("--context", flags->context, "tokens per window")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command->add_option("--max-windows", flags->max_windows, "score only the first windows, 0 = all")
      ->check(CLI::Range(int32_t{0}, std::numeric_limits<int32_t>::max()))
      ->capture_default_str();
}

absl::StatusOr<std::string> ReadWindowedText(const TextWindowFlags& flags) {
  return ReadFile(flags.text, kMaxTextBytes);
}

absl::StatusOr<int64_t> NumTextWindows(const TextWindowFlags& flags, size_t num_tokens) {
  const int64_t num_windows = static_cast<int64_t>(num_tokens) / flags.context;
  if (num_windows == 0) {
    return InvalidArgumentError("--text: {} has {} tokens, one window needs {}; lower --context",
                                flags.text, num_tokens, flags.context);
  }
  return flags.max_windows > 0 ? std::min<int64_t>(num_windows, flags.max_windows) : num_windows;
}

}  // namespace flashquant
