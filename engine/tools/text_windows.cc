// See text_windows.h.
#include "engine/tools/text_windows.h"

#include <algorithm>
#include <limits>
#include <utility>

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
  command
      ->add_option(
          "--stride", flags->stride,
          "tokens from one window to the next, 0 = the context; fewer: windows overlap, each "
          "token is scored once with more before it")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command->add_option("--max-windows", flags->max_windows, "score only the first windows, 0 = all")
      ->check(CLI::Range(int32_t{0}, std::numeric_limits<int32_t>::max()))
      ->capture_default_str();
}

absl::StatusOr<std::string> ReadWindowedText(const TextWindowFlags& flags) {
  return ReadFile(flags.text, kMaxTextBytes);
}

absl::StatusOr<std::vector<TextWindow>> CutTextWindows(const TextWindowFlags& flags,
                                                       std::span<const int32_t> tokens) {
  const int32_t stride = flags.distance();
  if (stride > flags.context) {
    return InvalidArgumentError("--stride: must be at most --context (limit {}, got {})",
                                flags.context, stride);
  }
  const auto context = static_cast<size_t>(flags.context);
  if (tokens.size() < context) {
    return InvalidArgumentError("--text: {} has {} tokens, one window needs {}; lower --context",
                                flags.text, tokens.size(), flags.context);
  }
  std::vector<TextWindow> windows;
  for (size_t begin = 0; begin + context <= tokens.size(); begin += static_cast<size_t>(stride)) {
    if (flags.max_windows > 0 && std::cmp_equal(windows.size(), flags.max_windows)) break;
    windows.push_back({.tokens = tokens.subspan(begin, context),
                       .first_scored = begin == 0 ? 1 : std::max(1, flags.context - stride)});
  }
  return windows;
}

}  // namespace flashquant
