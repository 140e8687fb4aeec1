// The safetensors container: a bounded parser of the header and a writer that streams tensors to
// disk. One container for input and output; folders and shards are checkpoint.h and
// checkpoint_writer.h.
//
// Layout: u64 little-endian header length, JSON header, data. Rules as in the reference library
// (offsets start at 0, no gap, no overlap, last byte = end of file), and beyond it: a cap on the
// number of tensors and no name twice.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/tensor_source.h"

namespace flashquant {

inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
inline constexpr int64_t kMaxSafetensorsTensors = 100'000;
inline constexpr int64_t kMaxTensorNameBytes = 1024;
inline constexpr int64_t kMaxTensorDims = 8;

struct SafetensorsTensor {
  TensorInfo info;
  int64_t file_offset = 0;  // of the first byte, from the start of the file
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;       // in the order of the data
  std::map<std::string, std::string> metadata;  // __metadata__
};

// Reads and checks the header of `file`; reads no tensor. DATA_LOSS "‹file›: ‹section›: ‹what›";
// UNIMPLEMENTED for another format (by magic) and for a dtype that we do not read.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const FileReader& file);

// The two halves of it, for callers that have the bytes: the length from the first eight bytes of a
// file of `file_bytes` (`head`: its first bytes, fewer than eight only in a shorter file), and the
// JSON text after them.
absl::StatusOr<int64_t> ParseSafetensorsHeaderLength(std::string_view file_name,
                                                     std::span<const uint8_t> head,
                                                     int64_t file_bytes);
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view file_name,
                                                         std::string_view header_text,
                                                         int64_t file_bytes);

// UNIMPLEMENTED "format not supported" when `head` starts like a GGUF, pickle, zip (torch), ONNX or
// stand-alone Tile-COO file; OK otherwise. Only for bytes that have already failed as safetensors.
absl::Status CheckForeignFormat(std::string_view file_name, std::span<const uint8_t> head);

// DATA_LOSS for an empty or too long name, control characters or "..".
absl::Status CheckTensorName(std::string_view where, std::string_view name);
// Bytes of a tensor; DATA_LOSS "tensor ‹name›: size overflow" for a dimension below 1, too many
// dimensions or a product beyond 2^63 - 1.
absl::StatusOr<int64_t> CheckedTensorBytes(std::string_view where, std::string_view name,
                                           DType dtype, std::span<const int64_t> shape);

// Key of a tensor's CRC-32C in __metadata__ and its value: eight lower-case hex digits.
std::string ChecksumKey(std::string_view tensor_name);
std::string ChecksumText(uint32_t crc);

// Writes one safetensors file. Tensor bytes are streamed to `‹path›.data` beside it, because the
// header, which stands first, needs all sizes and checksums; Finish joins the two. Any error is
// RESOURCE_EXHAUSTED (disk full), PERMISSION_DENIED or the like, and the files are then useless:
// the caller removes the folder. Not thread-safe.
class SafetensorsWriter final {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(const std::string& path);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Starts a tensor; its bytes follow in one or more Append calls, which must add up to its size
  // before the next Begin or Finish (INTERNAL otherwise).
  absl::Status Begin(std::string_view name, DType dtype, std::span<const int64_t> shape);
  absl::Status Append(std::span<const uint8_t> bytes);
  // Bytes of tensor data so far.
  int64_t data_bytes() const { return data_bytes_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  // Writes `path` (header with a checksum per tensor and `format` = "pt", then the data), syncs it
  // to disk and removes the data file.
  absl::Status Finish();

 private:
  explicit SafetensorsWriter(std::string path) : path_(std::move(path)) {}
  absl::Status EndTensor();
  std::string HeaderText() const;

  const std::string path_;
  int data_fd_ = -1;
  std::vector<TensorInfo> tensors_;
  std::vector<uint32_t> checksums_;
  int64_t data_bytes_ = 0;
  int64_t missing_bytes_ = 0;  // of the tensor begun last
};

// Writes all of `bytes` to `fd`; `path` is for the message.
absl::Status WriteAll(int fd, std::string_view path, std::span<const uint8_t> bytes);

}  // namespace flashquant
