// Parsing by hand; hashes, comparison and random bytes are OpenSSL's.
#include "server/token_file.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr size_t kMaxTokenBytes = 4096;
constexpr size_t kMaxNameBytes = 64;
constexpr std::string_view kSpace = " \t\r";

// Takes the next word off `text`; empty at its end.
std::string_view NextWord(std::string_view* text) {
  const size_t begin = std::min(text->find_first_not_of(kSpace), text->size());
  text->remove_prefix(begin);
  const size_t end = std::min(text->find_first_of(kSpace), text->size());
  const std::string_view word = text->substr(0, end);
  text->remove_prefix(end);
  return word;
}

bool IsName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                  c == '.' || c == '_' || c == '-';
         });
}

bool ParseHash(std::string_view hex, TokenHash* hash) {
  if (hex.size() != 2 * hash->size()) return false;
  for (size_t i = 0; i < hash->size(); ++i) {
    const char* begin = hex.data() + 2 * i;
    const auto result = std::from_chars(begin, begin + 2, (*hash)[i], 16);
    if (result.ec != std::errc() || result.ptr != begin + 2) return false;
  }
  return true;
}

std::optional<std::chrono::sys_days> ParseDate(std::string_view text) {
  if (text.size() != 10 || text[4] != '-' || text[7] != '-') return std::nullopt;
  const auto number = [&](size_t at, size_t digits) -> int {
    unsigned value = 0;
    const char* begin = text.data() + at;
    const auto result = std::from_chars(begin, begin + digits, value);
    return result.ec == std::errc() && result.ptr == begin + digits ? static_cast<int>(value) : -1;
  };
  const int year = number(0, 4);
  const int month = number(5, 2);
  const int day = number(8, 2);
  if (year < 0 || month < 0 || day < 0) return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(year),
                                         std::chrono::month(static_cast<unsigned>(month)),
                                         std::chrono::day(static_cast<unsigned>(day))};
  if (!date.ok()) return std::nullopt;
  return std::chrono::sys_days(date);
}

std::string Hex(const TokenHash& hash) {
  std::string hex;
  for (const uint8_t byte : hash) hex += fmt::format("{:02x}", byte);
  return hex;
}

// The bytes of a small regular file whose mode keeps it private.
absl::StatusOr<std::string> ReadPrivateFile(const std::string& path, size_t max_bytes) {
  // Without O_NONBLOCK a FIFO would hang the start.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return NotFoundError("{}: cannot open the token file", path);
  struct stat info {};
  absl::Status error;
  std::string text(max_bytes + 1, '\0');
  size_t size = 0;
  if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
    error = FailedPreconditionError("{}: not a regular file", path);
  } else if ((info.st_mode & (S_IWGRP | S_IRWXO)) != 0) {
    error = FailedPreconditionError(
        "{}: mode {:04o} lets others at the tokens; chmod 600 (or 640 for a group that may read)",
        path, info.st_mode & 07777U);
  }
  while (error.ok() && size < text.size()) {
    const ssize_t got = read(file, text.data() + size, text.size() - size);
    if (got < 0) error = NotFoundError("{}: cannot read the token file", path);
    if (got <= 0) break;
    size += static_cast<size_t>(got);
  }
  close(file);
  if (!error.ok()) return error;
  text.resize(size);
  return text;
}

}  // namespace

TokenHash HashToken(std::string_view token) {
  TokenHash hash{};
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  return hash;
}

absl::Status TokenFile::AddLine(std::string_view line) {
  Entry entry;
  std::string_view rest = line;
  const std::string_view name = NextWord(&rest);
  const std::string_view hash = NextWord(&rest);
  const std::string_view expires = NextWord(&rest);
  if (!IsName(name)) {
    return FailedPreconditionError("name: must be 1 to {} of letters, digits, '.', '_', '-'",
                                   kMaxNameBytes);
  }
  if (!ParseHash(hash, &entry.hash)) {
    return FailedPreconditionError("hash: must be the 64 hex digits of a SHA-256");
  }
  if (!expires.empty()) {
    entry.expires = ParseDate(expires);
    if (!entry.expires) return FailedPreconditionError("expires: must be a date, YYYY-MM-DD");
  }
  if (!NextWord(&rest).empty()) return FailedPreconditionError("more than three fields");
  for (const Entry& other : entries_) {
    if (other.name == name) return FailedPreconditionError("name: given twice");
    if (other.hash == entry.hash) return FailedPreconditionError("hash: given twice");
  }
  if (entries_.size() == kMaxEntries) {
    return FailedPreconditionError("too many tokens (limit {})", kMaxEntries);
  }
  entry.name = std::string(name);
  entries_.push_back(std::move(entry));
  return absl::OkStatus();
}

absl::StatusOr<TokenFile> TokenFile::Parse(std::string_view text, std::string_view where) {
  if (text.size() > kMaxFileBytes) {
    return FailedPreconditionError("{}: too long (limit {} bytes)", where, kMaxFileBytes);
  }
  TokenFile file;
  for (int number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t first = line.find_first_not_of(kSpace);
    if (first == std::string_view::npos || line[first] == '#') continue;
    FQ_RETURN_IF_ERROR(Annotate(file.AddLine(line), fmt::format("{}:{}", where, number)));
  }
  if (file.entries_.empty()) {
    return FailedPreconditionError("{}: no token in it; make one with: flashquant token NAME",
                                   where);
  }
  return file;
}

absl::StatusOr<TokenFile> TokenFile::Load(const std::string& path) {
  FQ_ASSIGN_OR_RETURN(const std::string text, ReadPrivateFile(path, kMaxFileBytes));
  return Parse(text, path);
}

TokenVerdict TokenFile::Check(std::string_view token,
                              std::chrono::system_clock::time_point now) const {
  const TokenHash hash = HashToken(token);
  // In days: a time in the clock's nanoseconds ends in the year 2262, a date in 9999.
  const auto today = std::chrono::floor<std::chrono::days>(now);
  // No early end: the time must not tell how near a guess came, nor which entry it is.
  unsigned known = 0;
  unsigned valid = 0;
  for (const Entry& entry : entries_) {
    const unsigned same = CRYPTO_memcmp(hash.data(), entry.hash.data(), hash.size()) == 0 ? 1 : 0;
    const unsigned lives = !entry.expires || today < *entry.expires ? 1 : 0;
    known |= same;
    valid |= same & lives;
  }
  if (valid != 0) return TokenVerdict::kAccepted;
  return known != 0 ? TokenVerdict::kExpired : TokenVerdict::kUnknown;
}

std::optional<std::string_view> BearerToken(std::string_view header) {
  constexpr std::string_view kScheme = "bearer ";
  if (header.size() <= kScheme.size()) return std::nullopt;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    const char c = header[i];
    if ((c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c) != kScheme[i]) {
      return std::nullopt;
    }
  }
  const std::string_view token = header.substr(kScheme.size());
  const bool visible =
      std::all_of(token.begin(), token.end(), [](char c) { return c > ' ' && c < 0x7f; });
  if (!visible || token.size() > kMaxTokenBytes) return std::nullopt;
  return token;
}

absl::StatusOr<std::string> RandomToken() {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  constexpr size_t kNumDigits = 43;  // 258 bits: 32 bytes and a few
  std::array<uint8_t, kNumDigits> bytes{};
  if (RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1) {
    return InternalError("no random numbers");
  }
  std::string token = "fq_";
  for (const uint8_t byte : bytes) token += kDigits[byte % kDigits.size()];
  return token;
}

absl::StatusOr<std::string> TokenLine(std::string_view name, std::string_view token,
                                      std::string_view expires) {
  if (!IsName(name)) {
    return InvalidArgumentError("name: must be 1 to {} of letters, digits, '.', '_', '-'",
                                kMaxNameBytes);
  }
  if (!expires.empty() && !ParseDate(expires)) {
    return InvalidArgumentError("expires: must be a date, YYYY-MM-DD");
  }
  std::string line = fmt::format("{} {}", name, Hex(HashToken(token)));
  if (!expires.empty()) line += fmt::format(" {}", expires);
  return line;
}

}  // namespace flashquant
