// CheckpointWriter: writes a Hugging Face style folder that is there whole or not at all.
//
// Everything goes into `‹output›.partial-‹pid›` beside the output, each file synced, config.json
// (without which nothing loads) last; then one rename. A killed run leaves only a partial folder,
// which the next run for the same output removes. What the tensors mean is the caller's business
// (engine/quantize), except for the names of a quantized layer's tensors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint/safetensors.h"
#include "kernels/format/int4_weight.h"
#include "kernels/format/tile_coo.h"
#include "nlohmann/json.hpp"

namespace flashquant {

struct CheckpointWriterOptions {
  int64_t max_shard_bytes = int64_t{2} << 30;  // of tensor data; a larger tensor is a shard alone
};

// Not thread-safe. After an error the writer is of no more use; destroying it removes the partial
// folder. Errors: RESOURCE_EXHAUSTED (disk full), PERMISSION_DENIED, NOT_FOUND (no parent folder).
class CheckpointWriter final {
 public:
  // INVALID_ARGUMENT when `output_dir` exists and is not an empty folder.
  static absl::StatusOr<std::unique_ptr<CheckpointWriter>> Create(
      const std::string& output_dir, const CheckpointWriterOptions& options = {});
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // One whole tensor, its bytes row-major.
  absl::Status AddTensor(std::string_view name, DType dtype, std::span<const int64_t> shape,
                         std::span<const uint8_t> bytes);
  absl::Status AddTensor(std::string_view name, DType dtype, std::initializer_list<int64_t> shape,
                         std::span<const uint8_t> bytes);
  // The same in pieces: BeginTensor, then AppendBytes until its size is reached.
  absl::Status BeginTensor(std::string_view name, DType dtype, std::span<const int64_t> shape);
  absl::Status AppendBytes(std::span<const uint8_t> bytes);

  // A file beside the tensors ("tokenizer.json"): a plain name, each once.
  absl::Status WriteTextFile(std::string_view file_name, std::string_view text);
  // The same with the content of `source_path`, at most 256 MiB.
  absl::Status CopyTextFile(const std::string& source_path, std::string_view file_name);

  // Bytes of all tensors so far.
  int64_t tensor_bytes() const;
  // The folder until Finish, "‹output›.partial-‹pid›", for what writes files by itself. Such files
  // are kept by Finish, but not synced.
  const std::string& partial_dir() const { return partial_dir_; }
  // Writes shards' final names, the index if there are several, then config.json, and makes the
  // folder appear. No call may follow.
  absl::Status Finish(const nlohmann::json& config);

 private:
  CheckpointWriter(std::string output_dir, const CheckpointWriterOptions& options);
  absl::Status CreatePartialDir();
  absl::Status FinishShard();
  absl::Status NameShards();

  const std::string output_dir_;  // without a trailing slash
  const std::string partial_dir_;
  const CheckpointWriterOptions options_;
  int lock_fd_ = -1;  // of the partial folder: held while we live
  bool created_ = false;
  std::unique_ptr<SafetensorsWriter> shard_;
  std::vector<std::string> shard_paths_;           // closed ones
  std::map<std::string, size_t> shard_of_tensor_;  // number of the shard, from 0
  int64_t closed_bytes_ = 0;
};

// The tensors of one quantized layer `name`, under the names and shapes that ReadQuantizedLinear
// expects. `outliers` may be null or hold no record.
absl::Status WriteQuantizedLinear(CheckpointWriter* writer, std::string_view name,
                                  const Int4Weight& weight, const TileCooMatrix* outliers);

// An 8-bit table: `codes` [rows, k] under `name`, `scales` [rows, 1] under `name`_scale.
absl::Status WriteInt8Table(CheckpointWriter* writer, std::string_view name, int64_t rows,
                            int64_t k, std::span<const int8_t> codes,
                            std::span<const BFloat16> scales);

}  // namespace flashquant
