// The writing half of safetensors.h.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "engine/checkpoint/json.h"
#include "engine/checkpoint/safetensors.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// Data is padded to this, so that a reader that maps the file finds tensors of whole elements.
constexpr size_t kHeaderAlignment = 8;

std::string DataPath(const std::string& path) { return path + ".data"; }

absl::Status CopyBytes(const FileReader& from, int to_fd, const std::string& to_path) {
  std::vector<uint8_t> buffer(size_t{1} << 20);
  for (int64_t offset = 0; offset < from.num_bytes();) {
    const int64_t piece =
        std::min<int64_t>(from.num_bytes() - offset, static_cast<int64_t>(buffer.size()));
    FQ_RETURN_IF_ERROR(from.ReadAt(offset, piece, buffer.data()));
    FQ_RETURN_IF_ERROR(WriteAll(
        to_fd, to_path, std::span<const uint8_t>(buffer).first(static_cast<size_t>(piece))));
    offset += piece;
  }
  return absl::OkStatus();
}

}  // namespace

std::string ChecksumKey(std::string_view tensor_name) {
  return fmt::format("crc32c.{}", tensor_name);
}

std::string ChecksumText(uint32_t crc) { return fmt::format("{:08x}", crc); }

absl::Status WriteAll(int fd, std::string_view path, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), std::min(bytes.size(), size_t{1} << 30));
    if (written < 0) {
      if (errno == EINTR) continue;
      return ErrnoStatus(errno, path, "write");
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path) {
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter(path));
  const std::string data_path = DataPath(path);
  writer->data_fd_ = ::open(data_path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (writer->data_fd_ < 0) return ErrnoStatus(errno, data_path, "create");
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (data_fd_ >= 0) ::close(data_fd_);
}

absl::Status SafetensorsWriter::Begin(std::string_view name, DType dtype,
                                      std::span<const int64_t> shape) {
  FQ_RETURN_IF_ERROR(EndTensor());
  FQ_RETURN_IF_ERROR(CheckTensorName(path_, name));
  FQ_ASSIGN_OR_RETURN(const int64_t num_bytes, CheckedTensorBytes(path_, name, dtype, shape));
  tensors_.push_back({std::string(name), dtype, {shape.begin(), shape.end()}, num_bytes});
  checksums_.push_back(0);
  missing_bytes_ = num_bytes;
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Append(std::span<const uint8_t> bytes) {
  if (tensors_.empty()) return InternalError("{}: bytes before the first tensor", path_);
  if (static_cast<int64_t>(bytes.size()) > missing_bytes_) {
    return InternalError("{}: tensor {}: more bytes than its shape holds", path_,
                         tensors_.back().name);
  }
  FQ_RETURN_IF_ERROR(WriteAll(data_fd_, DataPath(path_), bytes));
  checksums_.back() = Crc32c(bytes.data(), bytes.size(), checksums_.back());
  missing_bytes_ -= static_cast<int64_t>(bytes.size());
  data_bytes_ += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::EndTensor() {
  if (missing_bytes_ == 0) return absl::OkStatus();
  return InternalError("{}: tensor {}: {} bytes missing", path_, tensors_.back().name,
                       missing_bytes_);
}

std::string SafetensorsWriter::HeaderText() const {
  nlohmann::json header = nlohmann::json::object();
  nlohmann::json metadata = {{"format", "pt"}};
  int64_t offset = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorInfo& tensor = tensors_[i];
    header[tensor.name] = {{"dtype", std::string(DTypeName(tensor.dtype))},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.num_bytes}}};
    metadata[ChecksumKey(tensor.name)] = ChecksumText(checksums_[i]);
    offset += tensor.num_bytes;
  }
  header["__metadata__"] = std::move(metadata);
  std::string text = DumpJson(header, -1);
  text.append((kHeaderAlignment - text.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
  return text;
}

absl::Status SafetensorsWriter::Finish() {
  FQ_RETURN_IF_ERROR(EndTensor());
  const std::string data_path = DataPath(path_);
  ::close(std::exchange(data_fd_, -1));
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<FileReader> data, FileReader::Open(data_path));

  const std::string text = HeaderText();
  std::vector<uint8_t> head(8);
  for (size_t i = 0; i < 8; ++i) head[i] = static_cast<uint8_t>(text.size() >> (8 * i));
  head.insert(head.end(), text.begin(), text.end());

  const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return ErrnoStatus(errno, path_, "create");
  absl::Status status = WriteAll(fd, path_, head);
  if (status.ok()) status = CopyBytes(*data, fd, path_);
  if (status.ok() && ::fsync(fd) != 0) status = ErrnoStatus(errno, path_, "sync");
  if (::close(fd) != 0 && status.ok()) status = ErrnoStatus(errno, path_, "close");
  FQ_RETURN_IF_ERROR(status);
  if (::unlink(data_path.c_str()) != 0) return ErrnoStatus(errno, data_path, "remove");
  return absl::OkStatus();
}

}  // namespace flashquant
