// A file: magic, checksum of the layer's weights, the matrix, CRC-32C of all before it. It is
// written under another name and renamed; nothing waits for the disk, because only a crash of the
// machine could lose it, and the checksum tells.
#include "engine/quantize/layer_journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <type_traits>
#include <utility>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/safetensors.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMagic = 0x31304c4a51466c66;
constexpr char kRunFile[] = "run";
constexpr int64_t kMaxLayerBytes = int64_t{1} << 36;

class ByteWriter {
 public:
  template <typename T>
  void Value(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof(T));
  }
  template <typename T>
  void Array(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    Value<uint64_t>(values.size());
    const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
    bytes_.insert(bytes_.end(), bytes, bytes + values.size() * sizeof(T));
  }
  std::vector<uint8_t> Take() { return std::move(bytes_); }

 private:
  std::vector<uint8_t> bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  template <typename T>
  bool Value(T* value) {
    if (bytes_.size() < sizeof(T)) return false;
    std::memcpy(value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return true;
  }
  template <typename T>
  bool Array(std::vector<T>* values) {
    uint64_t count = 0;
    if (!Value(&count) || count > bytes_.size() / sizeof(T)) return false;
    values->resize(count);
    if (count > 0) std::memcpy(values->data(), bytes_.data(), count * sizeof(T));
    bytes_ = bytes_.subspan(count * sizeof(T));
    return true;
  }
  bool empty() const { return bytes_.empty(); }

 private:
  std::span<const uint8_t> bytes_;
};

// Slots without the padding of the struct, so that equal matrices have equal bytes.
struct PackedSlot {
  int32_t k;
  int32_t n;
  uint16_t value_bits;
  uint16_t filler;
};
static_assert(sizeof(PackedSlot) == 12);

uint32_t ChecksumOf(std::span<const float> weights) {
  return Crc32c(weights.data(), weights.size_bytes());
}

bool WriteFile(const std::string& path, std::span<const uint8_t> bytes) {
  const std::string draft = path + ".new";
  const int fd = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return false;
  bool written = WriteAll(fd, draft, bytes).ok();
  written = ::close(fd) == 0 && written;
  return written && ::rename(draft.c_str(), path.c_str()) == 0;
}

}  // namespace

std::vector<uint8_t> SerializeMatrix(const QuantizedMatrix& matrix) {
  const Int4Weight& weight = matrix.weight;
  ByteWriter writer;
  for (const int64_t value : {weight.n, weight.k, weight.n_padded, weight.k_padded,
                              weight.group_size, int64_t{weight.symmetric}}) {
    writer.Value(value);
  }
  writer.Array(weight.qweight);
  writer.Array(weight.scales);
  writer.Array(weight.zeros);
  std::vector<PackedSlot> slots;
  slots.reserve(matrix.outliers.size());
  for (const TileCooSlot& slot : matrix.outliers) {
    slots.push_back({slot.k, slot.n, slot.value_bits, static_cast<uint16_t>(slot.filler)});
  }
  writer.Array(slots);
  for (const double value : {matrix.energy, matrix.error_without, matrix.error_with,
                             matrix.output_error, matrix.output_energy}) {
    writer.Value(value);
  }
  return writer.Take();
}

std::optional<QuantizedMatrix> ParseMatrix(std::span<const uint8_t> bytes) {
  ByteReader reader(bytes);
  QuantizedMatrix matrix;
  Int4Weight& weight = matrix.weight;
  int64_t symmetric = 0;
  bool ok = reader.Value(&weight.n) && reader.Value(&weight.k) && reader.Value(&weight.n_padded) &&
            reader.Value(&weight.k_padded) && reader.Value(&weight.group_size) &&
            reader.Value(&symmetric);
  weight.symmetric = symmetric != 0;
  std::vector<PackedSlot> slots;
  ok = ok && reader.Array(&weight.qweight) && reader.Array(&weight.scales) &&
       reader.Array(&weight.zeros) && reader.Array(&slots) && reader.Value(&matrix.energy) &&
       reader.Value(&matrix.error_without) && reader.Value(&matrix.error_with) &&
       reader.Value(&matrix.output_error) && reader.Value(&matrix.output_energy) && reader.empty();
  if (!ok || !ValidateInt4Weight(weight).ok()) return std::nullopt;
  for (const PackedSlot& slot : slots) {
    if (slot.k < 0 || slot.k >= weight.k || slot.n < 0 || slot.n >= weight.n) return std::nullopt;
    matrix.outliers.push_back({slot.k, slot.n, slot.value_bits, slot.filler != 0});
  }
  return matrix;
}

LayerJournal::LayerJournal(std::string folder, const std::string& fingerprint)
    : folder_(std::move(folder)) {
  if (::mkdir(folder_.c_str(), 0777) != 0 && errno != EEXIST) return;
  const int fd = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return;
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    ::close(fd);
    return;
  }
  lock_fd_ = fd;
  const std::string run = folder_ + "/" + kRunFile;
  const auto before = ReadFile(run, int64_t{1} << 24);
  if (before.ok() && *before == fingerprint) return;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
    fs::remove(entry.path(), ignored);
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(fingerprint.data());
  if (!WriteFile(run, {bytes, fingerprint.size()})) Remove();
}

LayerJournal::~LayerJournal() {
  if (lock_fd_ >= 0) ::close(lock_fd_);
}

std::string LayerJournal::PathOf(const std::string& layer) const {
  std::string name = layer;
  std::replace(name.begin(), name.end(), '/', '_');
  return folder_ + "/" + name + ".layer";
}

std::optional<QuantizedMatrix> LayerJournal::Find(const std::string& layer,
                                                  std::span<const float> weights) const {
  if (!is_on()) return std::nullopt;
  const auto text = ReadFile(PathOf(layer), kMaxLayerBytes);
  if (!text.ok() || text->size() < 16) return std::nullopt;
  const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(text->data()),
                                       text->size());
  uint64_t magic = 0;
  uint32_t weights_checksum = 0;
  uint32_t checksum = 0;
  std::memcpy(&magic, bytes.data(), sizeof(magic));
  std::memcpy(&weights_checksum, bytes.data() + 8, sizeof(weights_checksum));
  std::memcpy(&checksum, bytes.data() + bytes.size() - 4, sizeof(checksum));
  if (magic != kMagic || weights_checksum != ChecksumOf(weights) ||
      checksum != Crc32c(bytes.data(), bytes.size() - 4)) {
    return std::nullopt;
  }
  return ParseMatrix(bytes.subspan(12, bytes.size() - 16));
}

void LayerJournal::Store(const std::string& layer, std::span<const float> weights,
                         const QuantizedMatrix& matrix) {
  if (!is_on()) return;
  ByteWriter head;
  head.Value(kMagic);
  head.Value(ChecksumOf(weights));
  std::vector<uint8_t> bytes = head.Take();
  const std::vector<uint8_t> body = SerializeMatrix(matrix);
  bytes.insert(bytes.end(), body.begin(), body.end());
  const uint32_t checksum = Crc32c(bytes.data(), bytes.size());
  const auto* tail = reinterpret_cast<const uint8_t*>(&checksum);
  bytes.insert(bytes.end(), tail, tail + sizeof(checksum));
  if (!WriteFile(PathOf(layer), bytes)) Remove();
}

void LayerJournal::Remove() {
  const int lock_fd = lock_fd_.exchange(-1);
  if (lock_fd < 0) return;
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
  ::close(lock_fd);
}

std::string FilesFingerprint(const std::string& path) {
  std::vector<std::string> names;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    for (const auto& entry : fs::directory_iterator(path, ignored)) {
      names.push_back(entry.path().string());
    }
    std::sort(names.begin(), names.end());
  } else {
    names.push_back(path);
  }
  std::string text;
  for (const std::string& name : names) {
    struct stat info = {};
    if (::stat(name.c_str(), &info) != 0) continue;
    text +=
        fmt::format("{} {} {}.{}\n", name, info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
  }
  return text;
}

}  // namespace flashquant
