// flashquant tokenize: a text file as token ids.
//
// Without --json one line per token: id, tab, its bytes as a quoted JSON string. With --json one
// array of ids; with --lines one array per input line (the line feed is no part of a line).
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "engine/tokenizer/incremental_detokenizer.h"
#include "engine/tokenizer/tokenizer.h"
#include "engine/tools/commands.h"
#include "engine/tools/run_tool.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{256} << 20;

struct TokenizeOptions {
  std::string model;
  std::string file;
  bool json = false;
  bool lines = false;
  bool plain = false;
  bool bos = false;
};

absl::StatusOr<std::string> ReadStandardInput() {
  std::string text;
  std::vector<char> buffer(size_t{1} << 16);
  size_t num_read = 0;
  while ((num_read = std::fread(buffer.data(), 1, buffer.size(), stdin)) > 0) {
    text.append(buffer.data(), num_read);
    if (static_cast<int64_t>(text.size()) > kMaxTextBytes) {
      return DataLossError("standard input: too large (limit {} bytes)", kMaxTextBytes);
    }
  }
  if (std::ferror(stdin) != 0) return DataLossError("standard input: read error");
  return text;
}

// The tokens of one text (a file or a line of it) as they are printed.
class TokenPrinter final {
 public:
  TokenPrinter(const Tokenizer* tokenizer, const TokenizeOptions& options)
      : tokenizer_(tokenizer), options_(options) {}

  void Print(std::string_view text) const {
    std::vector<int32_t> ids =
        tokenizer_->Encode(text, options_.plain ? SpecialText::kPlain : SpecialText::kRecognised);
    if (options_.bos) ids.insert(ids.begin(), *tokenizer_->bos());
    std::string out;
    if (options_.json || options_.lines) {
      fmt::format_to(std::back_inserter(out), "[{}]\n", fmt::join(ids, ","));
    } else {
      for (const int32_t id : ids) {
        std::string shown;
        Utf8Repair repair;
        repair.Append(tokenizer_->TokenBytes(id), &shown);
        repair.Flush(&shown);
        fmt::format_to(std::back_inserter(out), "{}\t{}\n", id, DumpJson(shown, -1));
      }
    }
    std::fwrite(out.data(), 1, out.size(), stdout);
  }

 private:
  const Tokenizer* tokenizer_;
  const TokenizeOptions& options_;
};

absl::Status RunTokenize(const TokenizeOptions& options) {
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer, LoadTokenizer(options.model));
  if (options.bos && !tokenizer->bos()) {
    return DataLossError("{}: --bos: the tokenizer names no BOS token", options.model);
  }
  FQ_ASSIGN_OR_RETURN(const std::string text, options.file == "-"
                                                  ? ReadStandardInput()
                                                  : ReadFile(options.file, kMaxTextBytes));
  const TokenPrinter printer(tokenizer.get(), options);
  if (!options.lines) {
    printer.Print(text);
  } else {
    std::string_view rest = text;
    while (!rest.empty()) {
      const size_t end = rest.find('\n');
      printer.Print(rest.substr(0, end));
      rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
    }
  }
  if (std::fflush(stdout) != 0) return UnavailableError("standard output: write error");
  return absl::OkStatus();
}

}  // namespace

void AddTokenizeCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<TokenizeOptions>();
  CLI::App* command = app.add_subcommand("tokenize", "Print the token ids of a text file");
  command->add_option("--model", options->model, "folder with the tokenizer")->required();
  command->add_option("--file", options->file, "text file, - for standard input")->required();
  command->add_flag("--json", options->json, "one JSON array of ids");
  command->add_flag("--lines", options->lines, "one JSON array per input line");
  command->add_flag("--plain", options->plain, "do not recognise added tokens in the text");
  command->add_flag("--bos", options->bos, "put the BOS token first");
  command->callback(
      [options, exit_code] { *exit_code = RunTool([&] { return RunTokenize(*options); }); });
}

}  // namespace flashquant
