// flashquant token: makes a bearer token and the line of the token file that lets it in.
#include <iostream>
#include <memory>
#include <string>

#include "engine/base/exit_code.h"
#include "fmt/format.h"
#include "kernels/base/status_macros.h"
#include "server/commands.h"
#include "server/token_file.h"

namespace flashquant {
namespace {

struct TokenFlags {
  std::string name;
  std::string expires;
  bool from_stdin = false;
};

constexpr size_t kLeastTokenBytes = 32;

absl::Status MakeEntry(const TokenFlags& flags) {
  std::string token;
  if (flags.from_stdin) {
    std::getline(std::cin, token);
    if (!token.empty() && token.back() == '\r') token.pop_back();
    // A hash without salt or stretching is safe only for what cannot be guessed.
    if (token.size() < kLeastTokenBytes || !BearerToken("Bearer " + token)) {
      return InvalidArgumentError("token: must be {} to 4096 visible characters, random ones",
                                  kLeastTokenBytes);
    }
  } else {
    FQ_ASSIGN_OR_RETURN(token, RandomToken());
  }
  FQ_ASSIGN_OR_RETURN(const std::string line, TokenLine(flags.name, token, flags.expires));
  // The secret and the line apart: `flashquant token NAME >> tokens` adds the line alone.
  if (!flags.from_stdin) {
    fmt::print(stderr, "token (shown once; give it to the client): {}\n", token);
  }
  fmt::print("{}\n", line);
  return absl::OkStatus();
}

}  // namespace

void AddTokenCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<TokenFlags>();
  CLI::App* command = app.add_subcommand(
      "token", "Make a bearer token: the secret to stderr, its line for --token-file to stdout");
  command->add_option("name", flags->name, "who will hold it: letters, digits, '.', '_', '-'")
      ->required();
  command->add_option("--expires", flags->expires, "day from which it is refused, YYYY-MM-DD");
  command->add_flag("--stdin", flags->from_stdin,
                    "take the token from stdin instead of making one");
  command->callback([flags, exit_code] { *exit_code = ReportStatus(MakeEntry(*flags)); });
}

}  // namespace flashquant
