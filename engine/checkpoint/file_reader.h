// FileReader: bounded reads of a regular file. Everything that comes from a model folder goes
// through it.
//
// Never a memory mapping: a mapped file that shrinks turns a read into SIGBUS, pread turns it into
// an error. Opening a FIFO, a device or a folder is refused before it can block.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace flashquant {

// Owns the descriptor. Safe from several threads at once.
class FileReader final {
 public:
  // NOT_FOUND, PERMISSION_DENIED, DATA_LOSS (not a regular file), RESOURCE_EXHAUSTED (descriptors).
  static absl::StatusOr<std::unique_ptr<FileReader>> Open(const std::string& path);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  const std::string& path() const { return path_; }
  // Size in bytes when it was opened.
  int64_t num_bytes() const { return num_bytes_; }

  // Copies bytes [offset, offset + num_bytes) to `out`. DATA_LOSS when the range is not inside the
  // file or the file's size is no longer what it was at Open.
  absl::Status ReadAt(int64_t offset, int64_t num_bytes, void* out) const;

 private:
  FileReader(std::string path, int fd, int64_t num_bytes)
      : path_(std::move(path)), fd_(fd), num_bytes_(num_bytes) {}

  const std::string path_;
  const int fd_;
  const int64_t num_bytes_;
};

// The whole file. DATA_LOSS when it is larger than `max_bytes`; else as FileReader::Open.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes);

// The status for an errno of a system call on `path`: "‹path›: ‹action›: ‹error text›", code as in
// Open; ENOSPC, EDQUOT and EFBIG are RESOURCE_EXHAUSTED.
absl::Status ErrnoStatus(int error_number, std::string_view path, std::string_view action);

// `text` from a file, made fit for a one-line message: cut after 64 bytes, anything but printable
// ASCII as '?'.
std::string PrintableName(std::string_view text);

}  // namespace flashquant
