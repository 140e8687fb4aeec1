// Tokens (target F13). Input: a byte, then a token file (even byte) or a value of the header
// "authorization" (odd).
//
// Properties: no crash; an error names the line and shows nothing of what is in it; only the one
// token that the fixed file has is accepted, however it is written.
#include <cctype>
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "server/token_file.h"
#include "tests/fuzz/fuzz_input.h"

namespace flashquant {
namespace {

constexpr char kToken[] = "fq_right";
constexpr std::chrono::sys_days kToday = std::chrono::year(2026) / 11 / 30;

void RunFile(std::string_view text) {
  const absl::StatusOr<TokenFile> file = TokenFile::Parse(text, "tokens");
  if (file.ok()) {
    Require(file->size() >= 1 && file->size() <= TokenFile::kMaxEntries, "number of entries");
    Require(file->Check("never in a file", kToday) != TokenVerdict::kAccepted, "unknown token");
    return;
  }
  Require(file.status().code() == absl::StatusCode::kFailedPrecondition, "code of a refusal");
  std::string_view message(file.status().message().data(), file.status().message().size());
  Require(TakeUntil(':', &message) == "tokens", "the error does not begin with the file");
  while (!message.empty() && (std::isdigit(message.front()) != 0 || message.front() == ':')) {
    message.remove_prefix(1);
  }
  static const std::set<std::string_view> kTexts = {
      " name: must be 1 to 64 of letters, digits, '.', '_', '-'",
      " hash: must be the 64 hex digits of a SHA-256",
      " expires: must be a date, YYYY-MM-DD",
      " more than three fields",
      " name: given twice",
      " hash: given twice",
      " too many tokens (limit 4096)",
      " too long (limit 1048576 bytes)",
      " no token in it; make one with: flashquant token NAME"};
  Require(kTexts.contains(message), "a text that is not a fixed one");
}

void RunHeader(std::string_view header) {
  static const TokenFile file = *TokenFile::Parse(*TokenLine("alice", kToken, "2026-12-31"), "t");
  const std::optional<std::string_view> token = BearerToken(header);
  if (!token) return;
  Require(!token->empty() && token->size() <= 4096, "length of a token");
  for (const char c : *token) Require(c > ' ' && c <= '~', "invisible character in a token");
  const bool right = *token == kToken;
  Require((file.Check(*token, kToday) == TokenVerdict::kAccepted) == right, "wrong verdict");
  const auto expired = file.Check(*token, kToday + std::chrono::days(31));
  Require(expired == (right ? TokenVerdict::kExpired : TokenVerdict::kUnknown), "after its day");
}

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::FuzzInput input(data, size);
  if (input.Byte() % 2 == 0) {
    flashquant::RunFile(input.Rest());
  } else {
    flashquant::RunHeader(input.Rest());
  }
  return 0;
}
