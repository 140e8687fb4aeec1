// See many_rows_plan.h.
#include "kernels/cuda/linear_w4a16/many_rows_plan.h"

#include <algorithm>

#include "kernels/base/math_util.h"

namespace flashquant::cuda {
namespace {

constexpr int kAlignment = 1024;

}  // namespace

int ManyRowsTileRows(int m) {
  if (m <= 64) return m <= 32 ? 32 : 64;
  return CeilDiv(m, 96) * 96 < CeilDiv(m, 128) * 128 ? 96 : 128;
}

int ManyRowsTiles(const PackedLayout& layout, int m) {
  return CeilDiv(layout.num_strips, kTileStrips) * CeilDiv(m, ManyRowsTileRows(m));
}

int64_t ManyRowsWorkspaceFloats(int m, int num_blocks) {
  // More rows may have smaller tiles.
  const int tile_rows = m > 96 ? 128 : ManyRowsTileRows(m);
  return int64_t{num_blocks} * 2 * kTileN * tile_rows;
}

int64_t ManyRowsCounters(const PackedLayout& layout, int m) {
  return int64_t{CeilDiv(layout.num_strips, kTileStrips)} * std::max(1, CeilDiv(m, 96));
}

ManyRowsLayout LayOutManyRows(const PackedLayout& layout, int tile_rows, int shared_bytes) {
  const int x_halves = XStages(tile_rows) * XStageHalves(tile_rows);
  ManyRowsLayout shared;
  shared.x_offset = static_cast<uint32_t>(TileStages(tile_rows)) * kTileChunkBytes;
  shared.raw_offset = shared.x_offset + static_cast<uint32_t>(x_halves) * XHalfBytes(tile_rows);
  const int barriers = 2 * (TileStages(tile_rows) + XStages(tile_rows) + kMaxRawStages);
  const int64_t left = int64_t{shared_bytes} - kAlignment - shared.raw_offset - barriers * 8;
  const int64_t dense = layout.unit_dense_bytes;
  const int64_t outliers = layout.max_outlier_bytes;
  // As many stages as the longest record leaves room for; with two, long records go without.
  for (int stages = kMaxRawStages; stages >= 2; --stages) {
    const int64_t strip = (left / (stages * kTileStrips) - int64_t{sizeof(OutlierRef)}) /
                          kCopyAlignment * kCopyAlignment;
    if (strip < (stages > 2 ? dense + outliers : dense)) continue;
    shared.outlier_room = static_cast<uint32_t>(std::min(strip - dense, outliers));
    shared.raw_strip_bytes =
        RoundUp(static_cast<uint32_t>(dense) + shared.outlier_room, uint32_t{kCopyAlignment});
    const auto slots = static_cast<uint32_t>(stages * kTileStrips);
    shared.refs_offset = shared.raw_offset + slots * shared.raw_strip_bytes;
    shared.barrier_offset = shared.refs_offset + slots * uint32_t{sizeof(OutlierRef)};
    shared.num_bytes = shared.barrier_offset + static_cast<uint32_t>(barriers * 8 + kAlignment);
    shared.raw_stages = stages;
    return shared;
  }
  return shared;
}

}  // namespace flashquant::cuda
