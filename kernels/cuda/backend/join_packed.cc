#include "kernels/cuda/backend/join_packed.h"

#include <algorithm>

#include "kernels/base/math_util.h"

namespace flashquant::cuda {
namespace {

int64_t NumUnits(const PackedLayout& layout) {
  return int64_t{layout.num_strips} * layout.num_units;
}

}  // namespace

bool CanFollow(const PackedLayout& before, const PackedLayout& next) {
  return before.n % kStripN == 0 && before.k == next.k &&
         before.groups_per_chunk == next.groups_per_chunk && before.has_zeros == next.has_zeros;
}

// Units are ordered by strip, so parts follow one another in each of the buffer's three areas; only
// the offsets into the outliers move.
PackedLinear JoinPacked(const std::vector<PackedLinear>& parts) {
  PackedLinear joined;
  PackedLayout& layout = joined.layout;
  layout = parts[0].layout;
  layout.n = layout.num_strips = layout.max_outlier_bytes = 0;
  int64_t outlier_bytes = 0;
  for (const PackedLinear& part : parts) {
    layout.n += part.layout.n;
    layout.num_strips += part.layout.num_strips;
    layout.max_outlier_bytes = std::max(layout.max_outlier_bytes, part.layout.max_outlier_bytes);
    outlier_bytes += part.layout.num_bytes - part.layout.outliers_offset;
  }
  SetOffsets(&layout);
  layout.num_bytes = layout.outliers_offset + outlier_bytes;
  joined.bytes.resize(static_cast<size_t>(layout.num_bytes));
  uint8_t* dense = joined.bytes.data();
  auto* index = reinterpret_cast<OutlierRef*>(joined.bytes.data() + layout.index_offset);
  uint8_t* outliers = joined.bytes.data() + layout.outliers_offset;
  uint32_t first_outlier = 0;  // in 16 bytes
  for (const PackedLinear& part : parts) {
    const uint8_t* from = part.bytes.data();
    dense = std::copy_n(from, part.layout.index_offset, dense);
    const auto* refs = reinterpret_cast<const OutlierRef*>(from + part.layout.index_offset);
    index = std::transform(refs, refs + NumUnits(part.layout), index, [&](OutlierRef ref) {
      return OutlierRef{ref.offset + first_outlier, ref.num_16bytes};
    });
    const int64_t part_bytes = part.layout.num_bytes - part.layout.outliers_offset;
    outliers = std::copy_n(from + part.layout.outliers_offset, part_bytes, outliers);
    first_outlier += static_cast<uint32_t>(part_bytes / 16);
  }
  return joined;
}

}  // namespace flashquant::cuda
