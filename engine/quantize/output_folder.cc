#include "engine/quantize/output_folder.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/gguf_reader.h"
#include "engine/checkpoint/json.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

namespace fs = std::filesystem;

// Files of a folder that go along beside the tokenizer. README files describe the original and stay
// behind.
constexpr std::array kOtherFiles = {
    "added_tokens.json", "tokenizer.model", "chat_template.json", "LICENSE",      "LICENSE.txt",
    "LICENSE.md",        "NOTICE",          "NOTICE.txt",         "USE_POLICY.md"};

}  // namespace

absl::StatusOr<std::string> OutputFolder(const std::string& output_dir) {
  std::error_code error;
  std::string output = output_dir;
  while (output.size() > 1 && output.back() == '/') output.pop_back();
  if (!fs::is_directory(output, error)) return output;
  if (fs::path(output).filename() == "." || fs::path(output).filename() == "..") {
    output = fs::canonical(output, error).string();
    if (error) return ErrnoStatus(error.value(), output_dir, "resolve");
  }
  // Known before hours of work rather than after: the folder is put in place by a rename.
  struct statx info = {};
  if (::statx(AT_FDCWD, output.c_str(), AT_NO_AUTOMOUNT, 0, &info) == 0 &&
      (info.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0) {
    return InvalidArgumentError(
        "{}: output: a mount point cannot be replaced by the finished folder; name a folder in it",
        output_dir);
  }
  return output;
}

absl::StatusOr<std::string> WritingPlace(const std::string& output_dir, bool overwrite) {
  std::error_code error;
  if (!overwrite || !fs::exists(output_dir, error) || fs::is_empty(output_dir, error)) {
    return output_dir;
  }
  if (!fs::is_directory(output_dir, error) || !fs::exists(output_dir + "/config.json", error)) {
    return InvalidArgumentError("{}: --overwrite: not a model folder (it has no config.json)",
                                output_dir);
  }
  // What a killed run left under this name is ours to remove.
  const std::string replacement = output_dir + ".flashquant-replacement";
  fs::remove_all(replacement, error);
  if (error) return ErrnoStatus(error.value(), replacement, "remove");
  return replacement;
}

absl::Status ReplaceFolder(const std::string& replacement, const std::string& output_dir) {
  std::error_code error;
  if (::renameat2(AT_FDCWD, replacement.c_str(), AT_FDCWD, output_dir.c_str(), RENAME_EXCHANGE) !=
      0) {
    const std::string old = output_dir + ".old";
    fs::remove_all(old, error);
    if (!error) fs::rename(output_dir, old, error);
    if (error) return ErrnoStatus(error.value(), output_dir, "move away");
    fs::rename(replacement, output_dir, error);
    if (error) return ErrnoStatus(error.value(), output_dir, "replace");
    fs::rename(old, replacement, error);
  }
  if (!error) fs::remove_all(replacement, error);
  if (error) return ErrnoStatus(error.value(), replacement, "remove");
  return absl::OkStatus();
}

absl::Status CopyModelFiles(const Checkpoint& checkpoint, CheckpointWriter* writer) {
  FQ_RETURN_IF_ERROR(CopyTokenizerFiles(checkpoint.path, writer));
  if (!checkpoint.generation_config.empty()) {
    FQ_RETURN_IF_ERROR(writer->WriteTextFile("generation_config.json",
                                             DumpJson(checkpoint.generation_config) + "\n"));
  }
  for (const char* name : kOtherFiles) {
    const std::string path = fmt::format("{}/{}", checkpoint.path, name);
    std::error_code ignored;
    if (!fs::is_regular_file(path, ignored)) continue;
    FQ_RETURN_IF_ERROR(writer->CopyTextFile(path, name));
  }
  return absl::OkStatus();
}

}  // namespace flashquant
