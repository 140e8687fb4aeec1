// The kernel for many rows: who computes what, and what it takes. Pure host arithmetic.
//
// A tile is 128 channels and up to 32, 64, 96 or 128 rows. Tiles, each with all its units of K,
// stand in one line that is cut evenly over one block per SM (Stream-K); a tile that lies in more
// than one block is joined through the workspace.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear_w4a16/packed_format.h"
#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

inline constexpr int kTileStrips = 4;
inline constexpr int kTileN = kTileStrips * kStripN;
inline constexpr int kHalfFeatures = 64;                                // of a chunk; 128 bytes
inline constexpr uint32_t kTileHalfBytes = kTileN * kHalfFeatures * 2;  // dequantised
inline constexpr uint32_t kTileChunkBytes = 2 * kTileHalfBytes;

// What a block with tiles of `rows` rows has. Measured: a fourth group that dequantises changes
// nothing, since shared memory is what limits.
inline constexpr int kDequantGroups = 3;  // warpgroups
inline constexpr int kManyRowsThreads = 128 * (kDequantGroups + 2);
inline constexpr int kMaxRawStages = 4;

// Registers of a thread by role. The block starts with as many for each as fit.
inline constexpr int kCopyRegisters = 40;
FQ_HOST_DEVICE constexpr int MultiplyRegisters(int rows) { return rows <= 64 ? 120 : 200; }
FQ_HOST_DEVICE constexpr int DequantRegisters(int rows) { return rows <= 64 ? 96 : 80; }

FQ_HOST_DEVICE constexpr int TileStages(int rows) { return rows <= 64 ? 4 : 3; }
FQ_HOST_DEVICE constexpr int XStages(int rows) { return rows <= 32 ? 4 : rows <= 64 ? 3 : 5; }
// Halves of a chunk in a stage of x.
FQ_HOST_DEVICE constexpr int XStageHalves(int rows) { return rows <= 64 ? 2 : 1; }
FQ_HOST_DEVICE constexpr uint32_t XHalfBytes(int rows) {
  return static_cast<uint32_t>(rows * kHalfFeatures * 2);
}

// Bytes from a multiple of 1024 in shared memory on; the dequantised tile's stages come first.
struct ManyRowsLayout {
  uint32_t x_offset = 0;
  uint32_t raw_offset = 0;       // [stage][strip of the tile]: a unit's dense bytes, then outliers
  uint32_t raw_strip_bytes = 0;  // of one
  uint32_t outlier_room = 0;     // of that; what is longer is read from global memory
  uint32_t refs_offset = 0;      // OutlierRef [stage][strip]
  uint32_t barrier_offset = 0;
  uint32_t num_bytes = 0;
  int32_t raw_stages = 0;
};

// Rows of a tile for m rows: 32 or 64 up to 64 rows; above, 96 where tiles of 96 hold fewer rows in
// all than tiles of 128, else 128.
int ManyRowsTileRows(int m);

int ManyRowsTiles(const PackedLayout& layout, int m);

// FP32 elements of workspace, and counters, that are enough for any number of rows up to m.
int64_t ManyRowsWorkspaceFloats(int m, int num_blocks);
int64_t ManyRowsCounters(const PackedLayout& layout, int m);

// What fits in `shared_bytes`, 1023 of which alignment may take; raw_stages 0 when it does not.
ManyRowsLayout LayOutManyRows(const PackedLayout& layout, int tile_rows, int shared_bytes);

}  // namespace flashquant::cuda
