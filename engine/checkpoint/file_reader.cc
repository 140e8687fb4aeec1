#include "engine/checkpoint/file_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

absl::StatusCode CodeForErrno(int error_number) {
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
      return absl::StatusCode::kNotFound;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::StatusCode::kResourceExhausted;
    default:
      return absl::StatusCode::kDataLoss;
  }
}

}  // namespace

absl::Status ErrnoStatus(int error_number, std::string_view path, std::string_view action) {
  return absl::Status(
      CodeForErrno(error_number),
      fmt::format("{}: {}: {}", path, action, std::generic_category().message(error_number)));
}

std::string PrintableName(std::string_view text) {
  constexpr size_t kMaxBytes = 64;
  std::string result(text.substr(0, kMaxBytes));
  std::replace_if(
      result.begin(), result.end(), [](char c) { return c < 0x20 || c > 0x7e; }, '?');
  if (text.size() > kMaxBytes) result += "...";
  return result;
}

absl::StatusOr<std::unique_ptr<FileReader>> FileReader::Open(const std::string& path) {
  // Looked at before it is opened, because opening a device may already do something; looked at
  // again afterwards, because the name may mean another file by then. O_NONBLOCK: a FIFO without a
  // writer must not hang.
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) return ErrnoStatus(errno, path, "open");
  if (!S_ISREG(info.st_mode)) return DataLossError("{}: not a regular file", path);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return ErrnoStatus(errno, path, "open");
  std::unique_ptr<FileReader> reader;
  if (::fstat(fd, &info) != 0) {
    const int error_number = errno;
    ::close(fd);
    return ErrnoStatus(error_number, path, "stat");
  }
  reader.reset(new FileReader(path, fd, static_cast<int64_t>(info.st_size)));
  if (!S_ISREG(info.st_mode)) return DataLossError("{}: not a regular file", path);
  return reader;
}

FileReader::~FileReader() { ::close(fd_); }

absl::Status FileReader::ReadAt(int64_t offset, int64_t num_bytes, void* out) const {
  if (offset < 0 || num_bytes < 0 || offset > num_bytes_ || num_bytes > num_bytes_ - offset) {
    return DataLossError("{}: truncated: bytes {}..+{} lie outside (limit {}, got {})", path_,
                         offset, num_bytes, num_bytes_,
                         static_cast<double>(offset) + static_cast<double>(num_bytes));
  }
  struct stat info = {};
  if (::fstat(fd_, &info) != 0) return ErrnoStatus(errno, path_, "stat");
  if (info.st_size != num_bytes_) {
    return DataLossError("{}: file changed while being read (size was {}, got {})", path_,
                         num_bytes_, static_cast<int64_t>(info.st_size));
  }
  char* destination = static_cast<char*>(out);
  int64_t done = 0;
  while (done < num_bytes) {
    // Linux moves at most 2 GiB in one call; smaller pieces cost nothing.
    const auto want = static_cast<size_t>(std::min<int64_t>(num_bytes - done, int64_t{1} << 30));
    const ssize_t got = ::pread(fd_, destination + done, want, offset + done);
    if (got < 0) {
      if (errno == EINTR) continue;
      return ErrnoStatus(errno, path_, "read");
    }
    if (got == 0) {
      return DataLossError("{}: truncated: file changed while being read (size was {}, got {})",
                           path_, num_bytes_, offset + done);
    }
    done += got;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<FileReader> reader, FileReader::Open(path));
  if (reader->num_bytes() > max_bytes) {
    return DataLossError("{}: file too large (limit {} bytes, got {})", path, max_bytes,
                         reader->num_bytes());
  }
  std::string text(static_cast<size_t>(reader->num_bytes()), '\0');
  FQ_RETURN_IF_ERROR(reader->ReadAt(0, reader->num_bytes(), text.data()));
  return text;
}

}  // namespace flashquant
