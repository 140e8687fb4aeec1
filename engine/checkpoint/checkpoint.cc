#include "engine/checkpoint/checkpoint.h"

#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "engine/checkpoint/safetensors.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{4} << 20;
constexpr int64_t kMaxShards = 4096;
constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

struct StoredTensor {
  size_t file = 0;  // index into files_
  int64_t offset = 0;
  std::optional<uint32_t> checksum;
};

// The tensors of all safetensors files of a folder.
class FolderTensors final : public TensorSource {
 public:
  // Takes the file's tensors; DATA_LOSS when one is there already or its checksum is no checksum.
  absl::Status AddFile(std::unique_ptr<FileReader> file);
  // Sorts; after it the object is immutable.
  absl::Status Finish();

  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  std::optional<uint32_t> StoredChecksum(const TensorInfo& tensor) const override;
  absl::Status ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                        void* out) const override;
  // Path of the file that holds `name`; empty when none does.
  std::string FileOf(std::string_view name) const;

 private:
  const StoredTensor* FindStored(std::string_view name) const {
    const TensorInfo* const info = Find(name);
    return info == nullptr ? nullptr : &stored_[static_cast<size_t>(info - infos_.data())];
  }

  std::vector<std::unique_ptr<FileReader>> files_;
  std::vector<TensorInfo> infos_;     // sorted by name
  std::vector<StoredTensor> stored_;  // beside infos_
};

// Eight lower-case hex digits.
std::optional<uint32_t> ParseChecksum(std::string_view text) {
  if (text.size() != 8) return std::nullopt;
  uint32_t value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'a' && c <= 'f')) return std::nullopt;
    value = value << 4 | static_cast<uint32_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return value;
}

absl::Status FolderTensors::AddFile(std::unique_ptr<FileReader> file) {
  FQ_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(*file));
  for (SafetensorsTensor& tensor : header.tensors) {
    StoredTensor stored = {files_.size(), tensor.file_offset, std::nullopt};
    if (const auto crc = header.metadata.find(ChecksumKey(tensor.info.name));
        crc != header.metadata.end()) {
      stored.checksum = ParseChecksum(crc->second);
      if (!stored.checksum.has_value()) {
        return DataLossError("{}: header: checksum of tensor {} (need 8 hex digits, got {})",
                             file->path(), tensor.info.name, PrintableName(crc->second));
      }
    }
    infos_.push_back(std::move(tensor.info));
    stored_.push_back(stored);
  }
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

absl::Status FolderTensors::Finish() {
  std::vector<size_t> order(infos_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return infos_[a].name < infos_[b].name; });
  std::vector<TensorInfo> infos;
  std::vector<StoredTensor> stored;
  for (const size_t i : order) {
    if (!infos.empty() && infos.back().name == infos_[i].name) {
      return DataLossError("{}: tensor {}: also in {}", files_[stored_[i].file]->path(),
                           infos_[i].name, files_[stored.back().file]->path());
    }
    infos.push_back(std::move(infos_[i]));
    stored.push_back(stored_[i]);
  }
  infos_ = std::move(infos);
  stored_ = std::move(stored);
  return absl::OkStatus();
}

std::optional<uint32_t> FolderTensors::StoredChecksum(const TensorInfo& tensor) const {
  const StoredTensor* const stored = FindStored(tensor.name);
  return stored == nullptr ? std::nullopt : stored->checksum;
}

std::string FolderTensors::FileOf(std::string_view name) const {
  const StoredTensor* const stored = FindStored(name);
  return stored == nullptr ? std::string() : files_[stored->file]->path();
}

absl::Status FolderTensors::ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                                     void* out) const {
  const StoredTensor* const stored = FindStored(tensor.name);
  if (stored == nullptr) return DataLossError("missing tensor {}", tensor.name);
  const TensorInfo& info = infos_[static_cast<size_t>(stored - stored_.data())];
  if (first_row < 0 || num_rows < 0 || first_row > info.num_rows() - num_rows) {
    return InternalError("tensor {}: rows {}..+{} (limit {})", info.name, first_row, num_rows,
                         info.num_rows());
  }
  const FileReader& file = *files_[stored->file];
  const int64_t row_bytes = info.num_bytes / info.num_rows();
  FQ_RETURN_IF_ERROR(
      Annotate(file.ReadAt(stored->offset + first_row * row_bytes, num_rows * row_bytes, out),
               fmt::format("tensor {}", info.name)));
  if (num_rows != info.num_rows() || !stored->checksum.has_value() || !IsCheckedAtLoad(info.name)) {
    return absl::OkStatus();
  }
  const uint32_t crc = Crc32c(out, static_cast<size_t>(info.num_bytes));
  if (crc != *stored->checksum) {
    return DataLossError("{}: tensor {}: checksum (stated {:08x}, got {:08x})", file.path(),
                         info.name, *stored->checksum, crc);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> RealPath(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), &::free);
  if (real == nullptr) return ErrnoStatus(errno, path, "open");
  return std::string(real.get());
}

// A shard must lie in the folder after symbolic links. One exception: in Hugging Face's cache
// `snapshots/‹revision›/‹file›` links to `blobs/‹hash›` of the same model.
absl::Status CheckShardPath(const std::string& dir, const std::string& path) {
  FQ_ASSIGN_OR_RETURN(const std::string real_dir, RealPath(dir));
  FQ_ASSIGN_OR_RETURN(const std::string real_path, RealPath(path));
  const std::filesystem::path parent = std::filesystem::path(real_path).parent_path();
  const std::filesystem::path folder(real_dir);
  if (parent == folder) return absl::OkStatus();
  if (folder.parent_path().filename() == "snapshots" &&
      parent == folder.parent_path().parent_path() / "blobs") {
    return absl::OkStatus();
  }
  return DataLossError("{}: shard path: leads out of the folder", path);
}

absl::StatusOr<std::unique_ptr<FileReader>> OpenShard(const std::string& dir,
                                                      std::string_view name) {
  const std::string path = fmt::format("{}/{}", dir, name);
  FQ_RETURN_IF_ERROR(CheckShardPath(dir, path));
  return FileReader::Open(path);
}

bool IsPlainShardName(std::string_view name) {
  return name.ends_with(".safetensors") && !name.starts_with('.') &&
         name.find('/') == std::string_view::npos && PrintableName(name) == name;
}

// Opens the shards of the index and compares its map with what is in them.
absl::Status AddShards(const std::string& dir, const nlohmann::json& index_json,
                       FolderTensors* tensors) {
  const std::string where = fmt::format("{}/{}", dir, kIndexFile);
  FQ_ASSIGN_OR_RETURN(const JsonObject index, JsonObject::Create(index_json, where));
  FQ_ASSIGN_OR_RETURN(const JsonObject weight_map, index.GetObject("weight_map"));
  std::set<std::string> shards;
  for (const auto& [name, file] : weight_map.json().items()) {
    if (!file.is_string() || !IsPlainShardName(file.get_ref<const std::string&>())) {
      return weight_map.Error(
          name, fmt::format("shard path (need the name of a .safetensors file in the folder, got "
                            "{})",
                            PrintableName(file.is_string() ? file.get<std::string>()
                                                           : std::string(file.type_name()))));
    }
    shards.insert(file.get<std::string>());
  }
  if (shards.empty()) return index.Error("weight_map", "empty");
  if (static_cast<int64_t>(shards.size()) > kMaxShards) {
    return index.Error(
        "weight_map", fmt::format("too many shards (limit {}, got {})", kMaxShards, shards.size()));
  }
  for (const std::string& shard : shards) {
    FQ_ASSIGN_OR_RETURN(std::unique_ptr<FileReader> file, OpenShard(dir, shard));
    FQ_RETURN_IF_ERROR(tensors->AddFile(std::move(file)));
  }
  FQ_RETURN_IF_ERROR(tensors->Finish());
  for (const auto& [name, file] : weight_map.json().items()) {
    const std::string expected = fmt::format("{}/{}", dir, file.get<std::string>());
    if (tensors->FileOf(name) != expected) {
      return DataLossError("{}: missing tensor {}", expected, PrintableName(name));
    }
  }
  return absl::OkStatus();
}

bool Exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

// What to say when there is no safetensors file at all: another format by name, or nothing.
absl::Status NoTensorsError(const std::string& dir) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(dir, ignored)) {
    const std::string name = entry.path().filename().string();
    const std::string extension = entry.path().extension().string();
    if (extension == ".gguf") {
      return UnimplementedError(
          "{}: format not supported: GGUF; import it with `flashquant quantize --input FILE.gguf "
          "--output DIR`",
          PrintableName(name));
    }
    if (extension == ".bin" || extension == ".pt" || extension == ".pth" || extension == ".onnx" ||
        extension == ".pkl") {
      return UnimplementedError("{}: format not supported; convert it to safetensors",
                                PrintableName(name));
    }
  }
  return NotFoundError("{}: neither {} nor {} is there", dir, kSingleFile, kIndexFile);
}

// The path is no folder: a file of some format, or nothing.
absl::Status NotAFolderError(const std::string& path) {
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<FileReader> file, FileReader::Open(path));
  std::array<uint8_t, 8> head = {};
  const int64_t num_bytes = std::min<int64_t>(8, file->num_bytes());
  FQ_RETURN_IF_ERROR(file->ReadAt(0, num_bytes, head.data()));
  FQ_RETURN_IF_ERROR(CheckForeignFormat(
      path, std::span<const uint8_t>(head).first(static_cast<size_t>(num_bytes))));
  return DataLossError("{}: not a model folder", path);
}

}  // namespace

absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& dir) {
  struct stat info = {};
  if (::stat(dir.c_str(), &info) != 0) return ErrnoStatus(errno, dir, "open");
  if (!S_ISDIR(info.st_mode)) return NotAFolderError(dir);

  Checkpoint checkpoint;
  checkpoint.path = dir;
  JsonLimits limits;
  limits.max_bytes = kMaxConfigBytes;
  absl::StatusOr<nlohmann::json> config = ReadJsonFile(dir + "/config.json", limits);
  if (!config.ok()) {
    // A folder with nothing but, say, a GGUF file deserves the better message.
    if (absl::IsNotFound(config.status())) {
      if (absl::Status status = NoTensorsError(dir); absl::IsUnimplemented(status)) return status;
      return NotFoundError("{}: not a model folder (it has no config.json)", dir);
    }
    return config.status();
  }
  checkpoint.config = *std::move(config);
  checkpoint.generation_config = nlohmann::json::object();
  if (const std::string path = dir + "/generation_config.json"; Exists(path)) {
    FQ_ASSIGN_OR_RETURN(checkpoint.generation_config, ReadJsonFile(path, limits));
  }

  auto tensors = std::make_unique<FolderTensors>();
  if (const std::string path = fmt::format("{}/{}", dir, kIndexFile); Exists(path)) {
    FQ_ASSIGN_OR_RETURN(const nlohmann::json index, ReadJsonFile(path));
    FQ_RETURN_IF_ERROR(AddShards(dir, index, tensors.get()));
  } else if (Exists(fmt::format("{}/{}", dir, kSingleFile))) {
    FQ_ASSIGN_OR_RETURN(std::unique_ptr<FileReader> file, OpenShard(dir, kSingleFile));
    FQ_RETURN_IF_ERROR(tensors->AddFile(std::move(file)));
    FQ_RETURN_IF_ERROR(tensors->Finish());
  } else {
    return NoTensorsError(dir);
  }
  checkpoint.tensors = std::move(tensors);
  return checkpoint;
}

}  // namespace flashquant
