// Where a quantized checkpoint is written and how it takes its place, and the files of the input
// that go along.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_writer.h"

namespace flashquant {

// The folder under the name by which it can be renamed: "." and "out/." cannot. INVALID_ARGUMENT
// for a mount point.
absl::StatusOr<std::string> OutputFolder(const std::string& output_dir);

// Where to write: the output itself, or a folder beside it that replaces it at the end.
// INVALID_ARGUMENT when what is to be replaced is not a model folder.
absl::StatusOr<std::string> WritingPlace(const std::string& output_dir, bool overwrite);

// Swaps the folders in one step where the file system can, so that `output_dir` is a whole model at
// any time; the old one goes.
absl::Status ReplaceFolder(const std::string& replacement, const std::string& output_dir);

// Tokenizer, chat template, generation_config.json, licence files.
absl::Status CopyModelFiles(const Checkpoint& checkpoint, CheckpointWriter* writer);

}  // namespace flashquant
