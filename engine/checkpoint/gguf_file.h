// GgufFile: an open GGUF file, its header checked, with typed access to the metadata. The header's
// layout is gguf_parser.h; what keys and tensors mean is gguf_reader.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/gguf_parser.h"

namespace flashquant {

// Typed access to the metadata; errors are DATA_LOSS "‹file›: ‹key›: ‹what›".
class GgufFile final {
 public:
  // Statuses of FileReader::Open; DATA_LOSS for anything malformed; UNIMPLEMENTED for another
  // version, a big-endian file and a tensor type that is not imported.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Open(const std::string& path);

  const FileReader& file() const { return *file_; }
  const std::string& path() const { return file_->path(); }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // sorted by name
  const GgufTensor* FindTensor(std::string_view name) const;

  bool Has(std::string_view key) const { return metadata_.find(key) != metadata_.end(); }
  absl::StatusOr<int64_t> GetInt(std::string_view key, int64_t min, int64_t max) const;
  absl::StatusOr<int64_t> GetIntOr(std::string_view key, int64_t fallback, int64_t min,
                                   int64_t max) const;
  absl::StatusOr<double> GetDouble(std::string_view key, double min, double max) const;
  absl::StatusOr<double> GetDoubleOr(std::string_view key, double fallback, double min,
                                     double max) const;
  absl::StatusOr<bool> GetBoolOr(std::string_view key, bool fallback) const;
  absl::StatusOr<std::string> GetString(std::string_view key) const;
  absl::StatusOr<std::string> GetStringOr(std::string_view key, std::string_view fallback) const;
  absl::StatusOr<const std::vector<std::string>*> GetStrings(std::string_view key) const;
  absl::StatusOr<const std::vector<int64_t>*> GetInts(std::string_view key) const;
  absl::StatusOr<const std::vector<double>*> GetDoubles(std::string_view key) const;
  absl::Status Error(std::string_view key, std::string_view what) const;

 private:
  GgufFile() = default;
  template <typename Value>
  absl::StatusOr<const Value*> Get(std::string_view key, std::string_view kind) const;

  std::unique_ptr<FileReader> file_;
  GgufMetadata metadata_;
  std::vector<GgufTensor> tensors_;
};

}  // namespace flashquant
