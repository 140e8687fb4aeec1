#include "kernels/cuda/backend/canonical_upload.h"

#include <algorithm>
#include <vector>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant::cuda {
namespace {

constexpr int64_t kAlignment = 256;

// That of the parts that have outliers; all parts' when they are joinable.
TileCooGeometry GeometryOf(std::span<const LinearPart> parts) {
  for (const LinearPart& part : parts) {
    if (part.outliers != nullptr) return part.outliers->geometry();
  }
  return {};
}

bool HasOutliers(std::span<const LinearPart> parts) {
  return std::any_of(parts.begin(), parts.end(), [](const LinearPart& part) {
    return part.outliers != nullptr && part.outliers->num_records() > 0;
  });
}

int64_t NumTiles(const LinearPart& part, TileCooGeometry geometry) {
  geometry.n = part.n();
  geometry.k = part.k();
  return geometry.num_tiles();
}

// Prefix sums of the records of all parts' tiles.
std::vector<uint32_t> JoinedIndptr(std::span<const LinearPart> parts) {
  const TileCooGeometry geometry = GeometryOf(parts);
  std::vector<uint32_t> joined = {0};
  for (const LinearPart& part : parts) {
    const uint32_t before = joined.back();
    if (part.outliers == nullptr) {
      joined.resize(joined.size() + static_cast<size_t>(NumTiles(part, geometry)), before);
      continue;
    }
    const std::vector<uint32_t>& own = part.outliers->arrays().tile_indptr;
    std::transform(own.begin() + 1, own.end(), std::back_inserter(joined),
                   [before](uint32_t records) { return before + records; });
  }
  return joined;
}

}  // namespace

bool IsCanonicallyJoinable(std::span<const LinearPart> parts) {
  const Int4Weight& first = *parts[0].int4;
  const TileCooGeometry tiles = GeometryOf(parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    const Int4Weight& weight = *parts[i].int4;
    if (weight.group_size != first.group_size || weight.symmetric != first.symmetric ||
        weight.k_padded != first.k_padded) {
      return false;
    }
    if (parts[i].outliers != nullptr) {
      const TileCooGeometry& own = parts[i].outliers->geometry();
      if (own.tile_k != tiles.tile_k || own.tile_n != tiles.tile_n) return false;
    }
    const bool is_last = i + 1 == parts.size();
    if (!is_last && (weight.n % tiles.tile_n != 0 || weight.n % kStripN != 0)) return false;
  }
  return true;
}

CanonicalLayer PlaceCanonicalLayer(std::span<const LinearPart> parts, uint8_t* staging) {
  CanonicalLayer layer;
  const Int4Weight& first = *parts[0].int4;
  Int4Arrays& weight = layer.weight;
  weight.k = first.k;
  weight.k_padded = first.k_padded;
  weight.group_size = first.group_size;
  int64_t num_records = 0;
  for (const LinearPart& part : parts) {
    weight.n += part.int4->n;
    weight.n_padded += part.int4->n_padded;
    if (part.outliers != nullptr) num_records += part.outliers->num_records();
  }
  const auto place = [&](int64_t num_bytes) -> const uint8_t* {
    const uint8_t* pointer = staging == nullptr ? nullptr : staging + layer.num_bytes;
    layer.num_bytes += RoundUp(num_bytes, kAlignment);
    return pointer;
  };
  const int64_t groups = weight.n_padded * first.groups_per_row();
  weight.qweight = place(weight.n_padded * weight.k_padded / 2);
  weight.scales = reinterpret_cast<const uint16_t*>(place(groups * int64_t{sizeof(uint16_t)}));
  if (!first.symmetric) weight.zeros = place(groups);
  if (!HasOutliers(parts)) return layer;
  const TileCooGeometry geometry = GeometryOf(parts);
  layer.outliers.tile_k = geometry.tile_k;
  layer.outliers.tile_n = geometry.tile_n;
  int64_t num_tiles = 0;
  for (const LinearPart& part : parts) num_tiles += NumTiles(part, geometry);
  layer.outliers.tile_indptr =
      reinterpret_cast<const uint32_t*>(place((num_tiles + 1) * int64_t{sizeof(uint32_t)}));
  layer.outliers.records = place(num_records * int64_t{sizeof(TileCooRecord)});
  return layer;
}

absl::Status UploadCanonicalLayer(std::span<const LinearPart> parts, const CanonicalLayer& layer,
                                  Backend* backend) {
  // Each array is the parts' own, one after the other.
  const auto upload = [&](const void* to, const auto& array_of) -> absl::Status {
    auto* place = static_cast<uint8_t*>(const_cast<void*>(to));
    for (const LinearPart& part : parts) {
      const auto& array = array_of(part);
      const auto num_bytes = static_cast<int64_t>(array.size() * sizeof(array[0]));
      FQ_RETURN_IF_ERROR(backend->CopyToDevice(place, array.data(), num_bytes));
      place += num_bytes;
    }
    return absl::OkStatus();
  };
  FQ_RETURN_IF_ERROR(upload(
      layer.weight.qweight,
      [](const LinearPart& part) -> const auto& { return part.int4->qweight; }));
  FQ_RETURN_IF_ERROR(upload(
      layer.weight.scales,
      [](const LinearPart& part) -> const auto& { return part.int4->scales; }));
  FQ_RETURN_IF_ERROR(upload(
      layer.weight.zeros, [](const LinearPart& part) -> const auto& { return part.int4->zeros; }));
  if (layer.outliers.tile_indptr == nullptr) return absl::OkStatus();
  const std::vector<uint32_t> indptr = JoinedIndptr(parts);
  FQ_RETURN_IF_ERROR(backend->CopyToDevice(const_cast<uint32_t*>(layer.outliers.tile_indptr),
                                           indptr.data(),
                                           static_cast<int64_t>(indptr.size() * sizeof(uint32_t))));
  static const std::vector<TileCooRecord> kNoRecords;
  return upload(
      layer.outliers.records, [](const LinearPart& part) -> const auto& {
        return part.outliers == nullptr ? kNoRecords : part.outliers->arrays().records;
      });
}

}  // namespace flashquant::cuda
