// TokenFile: the bearer tokens that a server accepts, as SHA-256 hashes read from a file.
//
// One token a line: NAME HASH [EXPIRES]. NAME: 1 to 64 of letters, digits, '.', '_', '-'; it names
// the holder and is not secret. HASH: 64 hex digits. EXPIRES: a date, YYYY-MM-DD; the token ends at
// its first second, UTC. Empty lines and lines that start with '#' count as nothing.
// `flashquant token` makes an entry. Errors name file and line, never what is in it.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace flashquant {

enum class TokenVerdict { kAccepted, kMissing, kMalformed, kUnknown, kExpired };

using TokenHash = std::array<uint8_t, 32>;
TokenHash HashToken(std::string_view token);

// Immutable after Parse; any thread.
class TokenFile final {
 public:
  static constexpr size_t kMaxFileBytes = 1 << 20;
  static constexpr size_t kMaxEntries = 4096;

  // FAILED_PRECONDITION "<where>:<line>: ..." for a bad line, a name or hash given twice, no entry.
  static absl::StatusOr<TokenFile> Parse(std::string_view text, std::string_view where);
  // NOT_FOUND when it cannot be opened; FAILED_PRECONDITION also when it is no regular file, or
  // when others than owner and group may read it, or others than the owner may write it.
  static absl::StatusOr<TokenFile> Load(const std::string& path);

  // Compares the token's hash with every entry, in time that depends on the token's length only.
  TokenVerdict Check(std::string_view token, std::chrono::system_clock::time_point now) const;
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    std::string name;
    TokenHash hash{};
    std::optional<std::chrono::sys_days> expires;
  };
  absl::Status AddLine(std::string_view line);

  std::vector<Entry> entries_;
};

// The token in the values of the "authorization" header: exactly one value, "Bearer TOKEN" with the
// scheme in any case and a token of 1 to 4096 visible ASCII characters. nullopt when malformed.
std::optional<std::string_view> BearerToken(std::string_view header);

// A new token: "fq_" and 32 random bytes in URL-safe base64. INTERNAL without random numbers.
absl::StatusOr<std::string> RandomToken();
// The line for the file. INVALID_ARGUMENT for a bad name or date.
absl::StatusOr<std::string> TokenLine(std::string_view name, std::string_view token,
                                      std::string_view expires);

}  // namespace flashquant
