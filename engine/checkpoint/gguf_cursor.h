// GgufCursor: reads the header of a GGUF file front to back, through a buffer, and knows how much
// is left. Private to gguf_parser.cc.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint/file_reader.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

// All of metadata and tensor directory must fit.
inline constexpr uint64_t kMaxGgufHeaderBytes = uint64_t{256} << 20;

// Errors are DATA_LOSS "‹file›: header: ‹what›". The file must outlive it.
class GgufCursor final {
 public:
  explicit GgufCursor(const FileReader& file) : file_(file) {
    limit_ = std::min(static_cast<uint64_t>(file.num_bytes()), kMaxGgufHeaderBytes);
  }

  uint64_t position() const { return position_; }
  uint64_t remaining() const { return limit_ - position_; }

  absl::Status Read(uint64_t num_bytes, void* out) {
    if (num_bytes > remaining()) {
      return DataLossError("{}: header: truncated (need {} bytes at {}, limit {})", file_.path(),
                           num_bytes, position_, limit_);
    }
    auto* destination = static_cast<uint8_t*>(out);
    while (num_bytes > 0) {
      if (position_ < buffer_start_ || position_ >= buffer_start_ + buffer_.size()) {
        FQ_RETURN_IF_ERROR(Refill());
      }
      const uint64_t offset = position_ - buffer_start_;
      const uint64_t piece = std::min<uint64_t>(num_bytes, buffer_.size() - offset);
      std::copy_n(buffer_.data() + offset, piece, destination);
      destination += piece;
      position_ += piece;
      num_bytes -= piece;
    }
    return absl::OkStatus();
  }

  template <typename Number>
  absl::StatusOr<Number> ReadNumber() {
    static_assert(std::endian::native == std::endian::little);
    Number value = {};
    FQ_RETURN_IF_ERROR(Read(sizeof(Number), &value));
    return value;
  }

  absl::StatusOr<std::string> ReadString(uint64_t max_bytes) {
    FQ_ASSIGN_OR_RETURN(const uint64_t num_bytes, ReadNumber<uint64_t>());
    if (num_bytes > max_bytes || num_bytes > remaining()) {
      return DataLossError("{}: header: string too long (limit {}, got {})", file_.path(),
                           std::min(max_bytes, remaining()), num_bytes);
    }
    std::string text(num_bytes, '\0');
    FQ_RETURN_IF_ERROR(Read(num_bytes, text.data()));
    return text;
  }

 private:
  absl::Status Refill() {
    buffer_start_ = position_;
    buffer_.resize(std::min<uint64_t>(uint64_t{1} << 20, remaining()));
    return file_.ReadAt(static_cast<int64_t>(position_), static_cast<int64_t>(buffer_.size()),
                        buffer_.data());
  }

  const FileReader& file_;
  uint64_t limit_ = 0;
  uint64_t position_ = 0;
  uint64_t buffer_start_ = 0;
  std::vector<uint8_t> buffer_;
};

}  // namespace flashquant
