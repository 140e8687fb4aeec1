// Checks go from what needs nothing else (size, magic, version, header checksum) to what rests on
// everything before it (maxima and null count), so that each message names the first broken rule.
#include "kernels/format/tile_coo_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo_statistics.h"
#include "kernels/format/tile_coo_validate.h"

namespace flashquant {
namespace {

static_assert(std::endian::native == std::endian::little, "the file is read as little-endian");

constexpr std::array<uint8_t, 8> kMagic = {0x54, 0x43, 0x4F, 0x4F, 0x0D, 0x0A, 0x1A, 0x0A};
constexpr uint64_t kHeaderBytes = 256;
constexpr uint64_t kAlignment = 256;
constexpr uint64_t kRecordBytes = sizeof(TileCooRecord);
constexpr uint64_t kTailPaddingBytes = 8 * kRecordBytes;
constexpr uint16_t kVersionMajor = 1;
constexpr uint32_t kMustUnderstandFlags = 0xffffu;

// The header as stored; every field lies at its natural alignment, so the struct has no holes.
struct RawHeader {
  std::array<uint8_t, 8> magic{};
  uint16_t version_major = kVersionMajor;
  uint16_t version_minor = 0;
  uint32_t header_bytes = kHeaderBytes;
  uint64_t k = 0;
  uint64_t n = 0;
  uint16_t tile_k = 0;
  uint16_t tile_n = 0;
  uint16_t buckets_per_tile = 0;
  uint8_t group_size = kSlotsPerRecord;
  uint8_t value_type = 0;
  uint8_t col_mode = 0;
  uint8_t semantics = 0;
  uint8_t tile_order = 0;
  uint8_t order_hint = 0;
  uint32_t flags = 0;
  uint32_t num_tiles_k = 0;
  uint32_t num_tiles_n = 0;
  uint64_t real_slots = 0;
  uint64_t filler_slots = 0;
  uint64_t null_slots = 0;
  uint64_t num_groups = 0;
  uint64_t tile_indptr_offset = 0;
  uint64_t bucket_info_offset = 0;
  uint64_t groups_offset = 0;
  uint64_t file_bytes = 0;
  uint32_t max_tile_groups = 0;
  uint32_t max_bucket_groups = 0;
  uint64_t dense_hash = 0;
  uint32_t arrays_crc = 0;
  uint32_t header_crc = 0;
  std::array<uint8_t, 112> reserved{};
};
static_assert(sizeof(RawHeader) == kHeaderBytes);
static_assert(offsetof(RawHeader, flags) == 44 && offsetof(RawHeader, real_slots) == 56 &&
              offsetof(RawHeader, file_bytes) == 112 && offsetof(RawHeader, dense_hash) == 128 &&
              offsetof(RawHeader, header_crc) == 140 && offsetof(RawHeader, reserved) == 144);

uint32_t HeaderCrc(RawHeader header) {
  header.header_crc = 0;
  return Crc32c(&header, kHeaderBytes);
}

// Byte places of the arrays. With K and N below 2^31 and fewer than 2^32 records no sum wraps.
struct Layout {
  uint64_t num_tiles = 0;
  uint64_t num_buckets = 0;
  uint64_t indptr_end = 0;
  uint64_t bucket_info = 0;
  uint64_t bucket_info_end = 0;
  uint64_t groups = 0;
  uint64_t groups_end = 0;
  uint64_t end = 0;  // of the tail padding
};

Layout LayoutOf(const TileCooGeometry& geometry, uint64_t num_records) {
  Layout layout;
  layout.num_tiles = static_cast<uint64_t>(geometry.num_tiles());
  layout.num_buckets = layout.num_tiles * static_cast<uint64_t>(geometry.buckets_per_tile);
  layout.indptr_end = kHeaderBytes + sizeof(uint32_t) * (layout.num_tiles + 1);
  layout.bucket_info = RoundUp(layout.indptr_end, kAlignment);
  layout.bucket_info_end = layout.bucket_info + sizeof(TileCooBucket) * layout.num_buckets;
  layout.groups = RoundUp(layout.bucket_info_end, kAlignment);
  layout.groups_end = layout.groups + kRecordBytes * num_records;
  layout.end = layout.groups_end + kTailPaddingBytes;
  return layout;
}

absl::Status CheckIdentity(const RawHeader& raw) {
  if (raw.magic != kMagic) return DataLossError("tcoo header: magic is not that of Tile-COO");
  if (raw.version_major != kVersionMajor) {
    return UnimplementedError("tcoo header: version major {}, known {}", raw.version_major,
                              kVersionMajor);
  }
  if (raw.header_crc != HeaderCrc(raw)) {
    return DataLossError("tcoo header: CRC-32C {:08x}, stored {:08x}", HeaderCrc(raw),
                         raw.header_crc);
  }
  if (raw.header_bytes != kHeaderBytes) {
    return DataLossError("tcoo header: header_bytes is {}, allowed {}", raw.header_bytes,
                         kHeaderBytes);
  }
  if ((raw.flags & kMustUnderstandFlags) != 0) {
    return UnimplementedError("tcoo header: unknown must-understand flags {:#06x}",
                              raw.flags & kMustUnderstandFlags);
  }
  const bool reserved_used =
      std::any_of(raw.reserved.begin(), raw.reserved.end(), [](uint8_t byte) { return byte != 0; });
  if (raw.version_minor == 0 && reserved_used) {
    return DataLossError("tcoo header: reserved byte in 144..255 is not zero in version 1.0");
  }
  if (raw.group_size != kSlotsPerRecord) {
    return DataLossError("tcoo header: group_size is {}, allowed {}", raw.group_size,
                         kSlotsPerRecord);
  }
  if (raw.tile_order != 0) {
    return DataLossError("tcoo header: tile_order is {}, allowed 0", raw.tile_order);
  }
  return absl::OkStatus();
}

absl::StatusOr<TileCooGeometry> GeometryOf(const RawHeader& raw) {
  constexpr uint64_t kMaxDimension = std::numeric_limits<int32_t>::max();
  if (raw.k > kMaxDimension || raw.n > kMaxDimension) {
    return DataLossError("tcoo header: K is {} and N is {}, allowed 1..{}", raw.k, raw.n,
                         kMaxDimension);
  }
  constexpr auto kMaxHint = static_cast<uint8_t>(TileCooOrderHint::kKMajor);
  TileCooGeometry geometry;
  geometry.k = static_cast<int64_t>(raw.k);
  geometry.n = static_cast<int64_t>(raw.n);
  geometry.tile_k = raw.tile_k;
  geometry.tile_n = raw.tile_n;
  geometry.buckets_per_tile = raw.buckets_per_tile;
  geometry.value_type = static_cast<TileCooValueType>(raw.value_type);
  geometry.column_mode = static_cast<TileCooColumnMode>(raw.col_mode);
  geometry.semantics = static_cast<TileCooSemantics>(raw.semantics);
  geometry.order_hint = static_cast<TileCooOrderHint>(raw.order_hint);
  if (raw.version_minor > 0 && raw.order_hint > kMaxHint) {
    geometry.order_hint = TileCooOrderHint::kNone;
  }
  FQ_RETURN_IF_ERROR(ValidateTileCooGeometry(geometry));
  if (raw.num_tiles_k != static_cast<uint64_t>(geometry.num_tiles_k()) ||
      raw.num_tiles_n != static_cast<uint64_t>(geometry.num_tiles_n())) {
    return DataLossError("tcoo header: {} x {} tiles, K {} and N {} need {} x {}", raw.num_tiles_k,
                         raw.num_tiles_n, raw.k, raw.n, geometry.num_tiles_k(),
                         geometry.num_tiles_n());
  }
  return geometry;
}

absl::Status CheckCounts(const RawHeader& raw) {
  if (raw.num_groups > std::numeric_limits<uint32_t>::max()) {
    return DataLossError("tcoo header: n_groups is {} (limit {})", raw.num_groups,
                         std::numeric_limits<uint32_t>::max());
  }
  // Subtracting keeps clear of wrapping: each count is compared with what is left.
  uint64_t left = kSlotsPerRecord * raw.num_groups;
  for (const uint64_t count : {raw.real_slots, raw.filler_slots, raw.null_slots}) {
    if (count > left) {
      left = std::numeric_limits<uint64_t>::max();
      break;
    }
    left -= count;
  }
  if (left != 0) {
    return DataLossError("tcoo header: real {} + filler {} + null {} slots, {} groups hold {}",
                         raw.real_slots, raw.filler_slots, raw.null_slots, raw.num_groups,
                         kSlotsPerRecord * raw.num_groups);
  }
  return absl::OkStatus();
}

absl::Status CheckLayout(const RawHeader& raw, const Layout& layout, uint64_t num_bytes) {
  if (raw.tile_indptr_offset != kHeaderBytes || raw.bucket_info_offset != layout.bucket_info ||
      raw.groups_offset != layout.groups) {
    return DataLossError(
        "tcoo header: layout has arrays at {}, {} and {}, their places are {}, {} and {}",
        raw.tile_indptr_offset, raw.bucket_info_offset, raw.groups_offset, kHeaderBytes,
        layout.bucket_info, layout.groups);
  }
  if (raw.file_bytes != num_bytes) {
    return DataLossError("tcoo header: file_bytes is {}, the file has {}", raw.file_bytes,
                         num_bytes);
  }
  const bool trailing = raw.version_minor > 0 && raw.file_bytes > layout.end;
  if (raw.file_bytes != layout.end && !trailing) {
    return DataLossError("tcoo header: file_bytes is {}, the arrays end at {}", raw.file_bytes,
                         layout.end);
  }
  return absl::OkStatus();
}

absl::Status CheckZeros(std::span<const uint8_t> bytes, uint64_t begin, uint64_t end,
                        std::string_view what) {
  for (uint64_t i = begin; i < end; ++i) {
    if (bytes[i] != 0) {
      return DataLossError("tcoo {}: byte {} is {:#04x}, allowed 0", what, i, bytes[i]);
    }
  }
  return absl::OkStatus();
}

TileCooArrays CopyArrays(std::span<const uint8_t> bytes, const Layout& layout,
                         uint64_t num_records) {
  TileCooArrays arrays;
  arrays.tile_indptr.resize(layout.num_tiles + 1);
  std::memcpy(arrays.tile_indptr.data(), bytes.data() + kHeaderBytes,
              layout.indptr_end - kHeaderBytes);
  arrays.bucket_info.resize(layout.num_buckets);
  std::memcpy(arrays.bucket_info.data(), bytes.data() + layout.bucket_info,
              layout.bucket_info_end - layout.bucket_info);
  arrays.records.resize(num_records);
  if (num_records > 0) {
    std::memcpy(arrays.records.data(), bytes.data() + layout.groups,
                layout.groups_end - layout.groups);
  }
  return arrays;
}

absl::Status CheckStatistics(const RawHeader& raw, const TileCooMatrix& matrix) {
  const TileCooStatistics statistics = ComputeTileCooStatistics(matrix);
  if (raw.max_tile_groups != statistics.max_tile_records) {
    return DataLossError("tcoo header: max groups in a tile is {}, the arrays have {}",
                         raw.max_tile_groups, statistics.max_tile_records);
  }
  if (raw.max_bucket_groups != statistics.max_bucket_records) {
    return DataLossError("tcoo header: max groups in a bucket is {}, the arrays have {}",
                         raw.max_bucket_groups, statistics.max_bucket_records);
  }
  if (raw.null_slots != static_cast<uint64_t>(statistics.num_null_slots)) {
    return DataLossError("tcoo header: {} null slots, the arrays have {}", raw.null_slots,
                         statistics.num_null_slots);
  }
  return absl::OkStatus();
}

TileCooFileHeader PublicHeader(const RawHeader& raw) {
  return {.version_minor = raw.version_minor,
          .stored_order_hint = raw.order_hint,
          .flags = raw.flags,
          .counts = {static_cast<int64_t>(raw.real_slots), static_cast<int64_t>(raw.filler_slots),
                     static_cast<int64_t>(raw.null_slots)},
          .num_records = raw.num_groups,
          .file_bytes = raw.file_bytes,
          .max_tile_records = raw.max_tile_groups,
          .max_bucket_records = raw.max_bucket_groups,
          .dense_hash = raw.dense_hash,
          .arrays_crc32c = raw.arrays_crc,
          .header_crc32c = raw.header_crc};
}

RawHeader HeaderOf(const TileCooMatrix& matrix, const Layout& layout) {
  const TileCooGeometry& geometry = matrix.geometry();
  const TileCooStatistics statistics = ComputeTileCooStatistics(matrix);
  RawHeader raw;
  raw.magic = kMagic;
  raw.k = static_cast<uint64_t>(geometry.k);
  raw.n = static_cast<uint64_t>(geometry.n);
  raw.tile_k = static_cast<uint16_t>(geometry.tile_k);
  raw.tile_n = static_cast<uint16_t>(geometry.tile_n);
  raw.buckets_per_tile = static_cast<uint16_t>(geometry.buckets_per_tile);
  raw.value_type = static_cast<uint8_t>(geometry.value_type);
  raw.col_mode = static_cast<uint8_t>(geometry.column_mode);
  raw.semantics = static_cast<uint8_t>(geometry.semantics);
  raw.order_hint = static_cast<uint8_t>(geometry.order_hint);
  raw.num_tiles_k = static_cast<uint32_t>(geometry.num_tiles_k());
  raw.num_tiles_n = static_cast<uint32_t>(geometry.num_tiles_n());
  raw.null_slots = static_cast<uint64_t>(statistics.num_null_slots);
  raw.num_groups = static_cast<uint64_t>(matrix.num_records());
  raw.tile_indptr_offset = kHeaderBytes;
  raw.bucket_info_offset = layout.bucket_info;
  raw.groups_offset = layout.groups;
  raw.file_bytes = layout.end;
  raw.max_tile_groups = statistics.max_tile_records;
  raw.max_bucket_groups = statistics.max_bucket_records;
  return raw;
}

}  // namespace

absl::StatusOr<TileCooFile> ParseTileCooFile(std::span<const uint8_t> bytes) {
  if (bytes.size() < kHeaderBytes) {
    return DataLossError("tcoo: file of {} bytes, the header needs {}", bytes.size(), kHeaderBytes);
  }
  RawHeader raw;
  std::memcpy(&raw, bytes.data(), kHeaderBytes);
  FQ_RETURN_IF_ERROR(CheckIdentity(raw));
  FQ_ASSIGN_OR_RETURN(const TileCooGeometry geometry, GeometryOf(raw));
  FQ_RETURN_IF_ERROR(CheckCounts(raw));
  const Layout layout = LayoutOf(geometry, raw.num_groups);
  FQ_RETURN_IF_ERROR(CheckLayout(raw, layout, bytes.size()));

  const uint32_t arrays_crc = Crc32c(bytes.data() + kHeaderBytes, layout.end - kHeaderBytes);
  if (arrays_crc != raw.arrays_crc) {
    return DataLossError("tcoo arrays: CRC-32C {:08x}, stored {:08x}", arrays_crc, raw.arrays_crc);
  }
  FQ_RETURN_IF_ERROR(CheckZeros(bytes, layout.indptr_end, layout.bucket_info, "gap"));
  FQ_RETURN_IF_ERROR(CheckZeros(bytes, layout.bucket_info_end, layout.groups, "gap"));
  FQ_RETURN_IF_ERROR(CheckZeros(bytes, layout.groups_end, layout.end, "tail padding"));

  FQ_ASSIGN_OR_RETURN(TileCooMatrix matrix,
                      TileCooMatrix::Create(geometry, CopyArrays(bytes, layout, raw.num_groups)));
  FQ_RETURN_IF_ERROR(CheckStatistics(raw, matrix));
  return TileCooFile{PublicHeader(raw), std::move(matrix)};
}

absl::StatusOr<std::vector<uint8_t>> SerializeTileCooFile(const TileCooMatrix& matrix,
                                                          const TileCooSlotCounts& counts,
                                                          uint64_t dense_hash) {
  const Layout layout = LayoutOf(matrix.geometry(), static_cast<uint64_t>(matrix.num_records()));
  RawHeader raw = HeaderOf(matrix, layout);
  const int64_t num_used = matrix.num_slots() - static_cast<int64_t>(raw.null_slots);
  if (counts.real < 0 || counts.real > num_used || counts.filler != num_used - counts.real ||
      counts.null != static_cast<int64_t>(raw.null_slots)) {
    return InvalidArgumentError(
        "tcoo: real {}, filler {}, null {} slots, but the matrix stores {} and {} null ones",
        counts.real, counts.filler, counts.null, num_used, raw.null_slots);
  }
  raw.real_slots = static_cast<uint64_t>(counts.real);
  raw.filler_slots = static_cast<uint64_t>(counts.filler);
  raw.dense_hash = dense_hash;

  std::vector<uint8_t> bytes(layout.end);
  const TileCooArrays& arrays = matrix.arrays();
  std::memcpy(bytes.data() + kHeaderBytes, arrays.tile_indptr.data(),
              layout.indptr_end - kHeaderBytes);
  std::memcpy(bytes.data() + layout.bucket_info, arrays.bucket_info.data(),
              layout.bucket_info_end - layout.bucket_info);
  if (!arrays.records.empty()) {
    std::memcpy(bytes.data() + layout.groups, arrays.records.data(),
                layout.groups_end - layout.groups);
  }
  raw.arrays_crc = Crc32c(bytes.data() + kHeaderBytes, layout.end - kHeaderBytes);
  raw.header_crc = HeaderCrc(raw);
  std::memcpy(bytes.data(), &raw, kHeaderBytes);
  return bytes;
}

uint64_t DenseHash(const Int4Weight& weight) {
  const uint32_t codes = Crc32c(weight.qweight.data(), weight.qweight.size());
  uint32_t rest = Crc32c(weight.scales.data(), weight.scales.size() * sizeof(BFloat16));
  if (!weight.symmetric) rest = Crc32c(weight.zeros.data(), weight.zeros.size(), rest);
  const uint64_t hash = (static_cast<uint64_t>(codes) << 32) + rest;
  return hash == 0 ? 1 : hash;
}

absl::Status ValidateTileCooFileAgainstInt4(const TileCooFile& file, const Int4Weight& weight) {
  FQ_RETURN_IF_ERROR(ValidateOutliersAgainstInt4(weight, file.matrix));
  if (file.header.dense_hash != 0 && file.header.dense_hash != DenseHash(weight)) {
    return DataLossError("tcoo: dense_hash {:016x}, the INT4 tensors have {:016x}",
                         file.header.dense_hash, DenseHash(weight));
  }
  return absl::OkStatus();
}

}  // namespace flashquant
