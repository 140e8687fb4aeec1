#include "engine/checkpoint/checkpoint_writer.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "engine/checkpoint/json.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxCopiedBytes = int64_t{256} << 20;
constexpr std::string_view kPartialMark = ".partial-";

std::string WithoutTrailingSlashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string ParentOf(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// INVALID_ARGUMENT unless nothing is there or an empty folder, which rename replaces.
absl::Status CheckOutputIsFree(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::symlink_status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) return absl::OkStatus();
  if (status.type() == std::filesystem::file_type::none) {
    return ErrnoStatus(error.value(), path, "output");
  }
  if (status.type() != std::filesystem::file_type::directory) {
    return InvalidArgumentError("{}: output: exists and is no folder", path);
  }
  const bool empty = std::filesystem::is_empty(path, error);
  if (error) return ErrnoStatus(error.value(), path, "output");
  if (!empty) {
    return InvalidArgumentError(
        "{}: output: exists and is not empty; --overwrite replaces a model folder", path);
  }
  return absl::OkStatus();
}

// Locks a folder for the life of the descriptor; -1 when another process holds it or it cannot be
// opened.
int TryLockDir(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return -1;
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  ::close(fd);
  return -1;
}

// Removes what killed runs left: partial folders of this output that nobody has locked.
void RemoveStalePartialDirs(const std::string& output_dir) {
  const std::string prefix =
      std::filesystem::path(output_dir).filename().string() + std::string(kPartialMark);
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(ParentOf(output_dir), ignored)) {
    const std::string name = entry.path().filename().string();
    const std::string_view number =
        std::string_view(name).substr(std::min(name.size(), prefix.size()));
    if (!name.starts_with(prefix) || number.empty() ||
        number.find_first_not_of("0123456789") != std::string_view::npos) {
      continue;
    }
    const int fd = TryLockDir(entry.path().string());
    if (fd < 0) continue;
    std::filesystem::remove_all(entry.path(), ignored);
    ::close(fd);
  }
}

absl::Status SyncDir(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, path, "open");
  // Some file systems cannot sync a folder (EINVAL); then there is nothing more to be done.
  const bool failed = ::fsync(fd) != 0 && errno != EINVAL;
  const int error_number = errno;
  ::close(fd);
  return failed ? ErrnoStatus(error_number, path, "sync") : absl::OkStatus();
}

template <typename Element>
std::span<const uint8_t> AsBytes(std::span<const Element> elements) {
  return {reinterpret_cast<const uint8_t*>(elements.data()), elements.size_bytes()};
}

template <typename Element>
std::span<const uint8_t> AsBytes(const std::vector<Element>& elements) {
  return AsBytes(std::span<const Element>(elements));
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string output_dir, const CheckpointWriterOptions& options)
    : output_dir_(WithoutTrailingSlashes(std::move(output_dir))),
      partial_dir_(fmt::format("{}{}{}", output_dir_, kPartialMark, ::getpid())),
      options_(options) {}

absl::StatusOr<std::unique_ptr<CheckpointWriter>> CheckpointWriter::Create(
    const std::string& output_dir, const CheckpointWriterOptions& options) {
  if (output_dir.empty()) return InvalidArgumentError("output: empty path");
  std::unique_ptr<CheckpointWriter> writer(new CheckpointWriter(output_dir, options));
  FQ_RETURN_IF_ERROR(writer->CreatePartialDir());
  return writer;
}

absl::Status CheckpointWriter::CreatePartialDir() {
  FQ_RETURN_IF_ERROR(CheckOutputIsFree(output_dir_));
  RemoveStalePartialDirs(output_dir_);
  if (::mkdir(partial_dir_.c_str(), 0777) != 0) {
    return ErrnoStatus(errno, partial_dir_, "create folder");
  }
  created_ = true;
  lock_fd_ = TryLockDir(partial_dir_);
  if (lock_fd_ < 0) return ErrnoStatus(errno, partial_dir_, "lock folder");
  return absl::OkStatus();
}

CheckpointWriter::~CheckpointWriter() {
  shard_.reset();
  std::error_code ignored;
  if (created_) std::filesystem::remove_all(partial_dir_, ignored);
  if (lock_fd_ >= 0) ::close(lock_fd_);
}

absl::Status CheckpointWriter::BeginTensor(std::string_view name, DType dtype,
                                           std::span<const int64_t> shape) {
  FQ_ASSIGN_OR_RETURN(const int64_t num_bytes, CheckedTensorBytes(output_dir_, name, dtype, shape));
  if (shard_ != nullptr && num_bytes > options_.max_shard_bytes - shard_->data_bytes()) {
    FQ_RETURN_IF_ERROR(FinishShard());
  }
  if (shard_ == nullptr) {
    FQ_ASSIGN_OR_RETURN(shard_, SafetensorsWriter::Create(fmt::format(
                                    "{}/shard-{}.safetensors", partial_dir_, shard_paths_.size())));
  }
  if (!shard_of_tensor_.emplace(name, shard_paths_.size()).second) {
    return InternalError("{}: tensor {}: written twice", output_dir_, name);
  }
  return shard_->Begin(name, dtype, shape);
}

absl::Status CheckpointWriter::AppendBytes(std::span<const uint8_t> bytes) {
  if (shard_ == nullptr) return InternalError("{}: bytes before the first tensor", output_dir_);
  return shard_->Append(bytes);
}

absl::Status CheckpointWriter::AddTensor(std::string_view name, DType dtype,
                                         std::span<const int64_t> shape,
                                         std::span<const uint8_t> bytes) {
  FQ_RETURN_IF_ERROR(BeginTensor(name, dtype, shape));
  return AppendBytes(bytes);
}

absl::Status CheckpointWriter::AddTensor(std::string_view name, DType dtype,
                                         std::initializer_list<int64_t> shape,
                                         std::span<const uint8_t> bytes) {
  return AddTensor(name, dtype, std::span<const int64_t>(shape.begin(), shape.size()), bytes);
}

absl::Status CheckpointWriter::WriteTextFile(std::string_view file_name, std::string_view text) {
  const std::string path = fmt::format("{}/{}", partial_dir_, file_name);
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return ErrnoStatus(errno, path, "create");
  absl::Status status = WriteAll(fd, path, AsBytes(std::span<const char>(text)));
  if (status.ok() && ::fsync(fd) != 0) status = ErrnoStatus(errno, path, "sync");
  if (::close(fd) != 0 && status.ok()) status = ErrnoStatus(errno, path, "close");
  return status;
}

absl::Status CheckpointWriter::CopyTextFile(const std::string& source_path,
                                            std::string_view file_name) {
  FQ_ASSIGN_OR_RETURN(const std::string text, ReadFile(source_path, kMaxCopiedBytes));
  return WriteTextFile(file_name, text);
}

int64_t CheckpointWriter::tensor_bytes() const {
  return closed_bytes_ + (shard_ == nullptr ? 0 : shard_->data_bytes());
}

absl::Status CheckpointWriter::FinishShard() {
  if (shard_ == nullptr) return absl::OkStatus();
  FQ_RETURN_IF_ERROR(shard_->Finish());
  closed_bytes_ += shard_->data_bytes();
  shard_paths_.push_back(fmt::format("{}/shard-{}.safetensors", partial_dir_, shard_paths_.size()));
  shard_.reset();
  return absl::OkStatus();
}

// Only now it is known how many there are.
absl::Status CheckpointWriter::NameShards() {
  std::vector<std::string> names;
  for (size_t i = 0; i < shard_paths_.size(); ++i) {
    names.push_back(shard_paths_.size() == 1 ? std::string("model.safetensors")
                                             : fmt::format("model-{:05}-of-{:05}.safetensors",
                                                           i + 1, shard_paths_.size()));
    const std::string path = fmt::format("{}/{}", partial_dir_, names.back());
    if (::rename(shard_paths_[i].c_str(), path.c_str()) != 0) {
      return ErrnoStatus(errno, path, "rename");
    }
  }
  if (names.size() == 1) return absl::OkStatus();
  nlohmann::json weight_map = nlohmann::json::object();
  for (const auto& [tensor, shard] : shard_of_tensor_) weight_map[tensor] = names[shard];
  const nlohmann::json index = {{"metadata", {{"total_size", closed_bytes_}}},
                                {"weight_map", std::move(weight_map)}};
  return WriteTextFile("model.safetensors.index.json", DumpJson(index) + "\n");
}

absl::Status CheckpointWriter::Finish(const nlohmann::json& config) {
  FQ_RETURN_IF_ERROR(FinishShard());
  if (shard_paths_.empty()) return InternalError("{}: no tensors", output_dir_);
  FQ_RETURN_IF_ERROR(NameShards());
  FQ_RETURN_IF_ERROR(WriteTextFile("config.json", DumpJson(config) + "\n"));
  FQ_RETURN_IF_ERROR(SyncDir(partial_dir_));
  if (::rename(partial_dir_.c_str(), output_dir_.c_str()) != 0) {
    return ErrnoStatus(errno, output_dir_, "rename");
  }
  created_ = false;
  return SyncDir(ParentOf(output_dir_));
}

absl::Status WriteQuantizedLinear(CheckpointWriter* writer, std::string_view name,
                                  const Int4Weight& weight, const TileCooMatrix* outliers) {
  const auto add = [&](std::string_view suffix, DType dtype, std::initializer_list<int64_t> shape,
                       std::span<const uint8_t> bytes) {
    return writer->AddTensor(fmt::format("{}{}", name, suffix), dtype, shape, bytes);
  };
  const int64_t groups = weight.groups_per_row();
  FQ_RETURN_IF_ERROR(add(kCodesSuffix, DType::kU8, {weight.n_padded, weight.k_padded / 2},
                         AsBytes(weight.qweight)));
  FQ_RETURN_IF_ERROR(
      add(kScalesSuffix, DType::kBF16, {weight.n_padded, groups}, AsBytes(weight.scales)));
  if (!weight.symmetric) {
    FQ_RETURN_IF_ERROR(
        add(kZerosSuffix, DType::kU8, {weight.n_padded, groups}, AsBytes(weight.zeros)));
  }
  // No shape ever holds a 0: a layer without outliers has none of the three.
  if (outliers == nullptr || outliers->num_records() == 0) return absl::OkStatus();
  const TileCooArrays& arrays = outliers->arrays();
  const int64_t num_tiles = outliers->geometry().num_tiles();
  FQ_RETURN_IF_ERROR(
      add(kTileIndptrSuffix, DType::kU32, {num_tiles + 1}, AsBytes(arrays.tile_indptr)));
  FQ_RETURN_IF_ERROR(add(kBucketInfoSuffix, DType::kU16,
                         {num_tiles, outliers->geometry().buckets_per_tile, 2},
                         AsBytes(arrays.bucket_info)));
  return add(kRecordsSuffix, DType::kU8,
             {outliers->num_records(), static_cast<int64_t>(sizeof(TileCooRecord))},
             AsBytes(arrays.records));
}

absl::Status WriteInt8Table(CheckpointWriter* writer, std::string_view name, int64_t rows,
                            int64_t k, std::span<const int8_t> codes,
                            std::span<const BFloat16> scales) {
  FQ_RETURN_IF_ERROR(writer->AddTensor(name, DType::kI8, {rows, k}, AsBytes(codes)));
  return writer->AddTensor(fmt::format("{}{}", name, kTableScaleSuffix), DType::kBF16, {rows, 1},
                           AsBytes(scales));
}

}  // namespace flashquant
