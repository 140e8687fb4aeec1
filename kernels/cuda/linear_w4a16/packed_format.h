// The form in which the fused W4A16 + outlier kernel reads a weight. Shared by the host packer
// (pack.h), the device packer and the kernel. A cache made at load from the canonical arrays, never
// a file format.
//
// A unit is 32 output channels (a strip) x 256 input features (two chunks of 128). Units are
// ordered by strip, then by feature. One buffer holds three parts, each 16-byte aligned
// (PackedLayout):
//
// 1. Dense: per unit two chunks, each 2048 bytes of codes, then per quantization group in the chunk
//    (G = 1, 2 or 4; a group of 128 or more counts as one per chunk) 64 bytes of scales, then, with
//    zero points, G x 64 bytes of 128 + z.
//    Codes: 4 pairs of k16 steps x 32 lanes x 16 bytes. The 16 bytes of lane (g, t) in a pair are
//    four words: step 0 row g, step 0 row g + 8, step 1 row g, step 1 row g + 8 of both blocks. A
//    block is 16 channels: row g + 8h of block b is channel 4g + 2b + h of the strip, so that a
//    lane's sums are four neighbours. Bits 4r + 16i .. + 3 of a word are of block r % 2, feature
//    4t + i + 2 * (r / 2), so that a byte is the code of block 0 plus 16 times that of block 1, and
//    two bytes under the mask 0x00ff00ff are half a row of a BF16 MMA's A fragment (dense.cuh).
//    Scales and zero points: BF16, by channel.
// 2. Index: one OutlierRef per unit.
// 3. Outliers: per unit one record at a multiple of kCopyAlignment, in
//    pieces of at most kMaxPieceBytes: quads of four slots
//    (16 bytes: u16 positions, then BF16 values times 2^-60), first those of block 0, then those of
//    block 1, then a trailer quad: u16 byte offset of the quad in which block 1 begins, u16 bytes
//    of the longer block's quads, then zeros, so that it can be read as a quad of nothing. A unit
//    without outliers has no record. position = RowOf(channel) | XRow(feature in the unit) << 4 |
//    BlockOf(channel) << 12. The blocks meet inside a quad: a reader ignores slots of the other
//    block, so that no slot is padding but the last three of a piece (value +0). Four bytes a slot,
//    as in Tile-COO. Every outlier becomes one column of an MMA (design "kernel", strategy 3b; one
//    outlier per slot instead of one slot per distinct feature: at 1 to 3% the slots of 3b hold 14
//    to 18.5 outliers of 16 anyway, and this needs no lane masks).
#pragma once

#include <cstdint>

#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

inline constexpr int kStripN = 32;
inline constexpr int kChunkK = 128;
inline constexpr int kUnitChunks = 2;
inline constexpr int kUnitK = kUnitChunks * kChunkK;
inline constexpr int kBlocksPerStrip = 2;
inline constexpr int kCodeBytes = kStripN * kChunkK / 2;
// Bulk copies from and to places at multiples of it are faster: outlier records begin there, what
// follows one being zeros, and so do the places in shared memory.
inline constexpr int kCopyAlignment = 128;
inline constexpr int kOutlierExponent = 60;  // values are stored times 2^-60
inline constexpr int kGroupScaleBytes = kStripN * 2;
inline constexpr int kSlotsPerQuad = 4;
inline constexpr int kQuadBytes = 16;
inline constexpr int kMaxPieceBytes = 4096;  // trailer included
inline constexpr int kMaxPieceSlots = (kMaxPieceBytes / kQuadBytes - 1) * kSlotsPerQuad;
inline constexpr int kRowsPerBatchBlock = 8;  // batch rows of one MMA

constexpr int ChunkDenseBytes(int groups_per_chunk, bool has_zeros) {
  return kCodeBytes + groups_per_chunk * kGroupScaleBytes * (has_zeros ? 2 : 1);
}

// Block of MMAs and row in it of a strip's channel.
FQ_HOST_DEVICE constexpr uint32_t BlockOf(uint32_t channel) { return channel / 2 % 2; }
FQ_HOST_DEVICE constexpr uint32_t RowOf(uint32_t channel) { return channel / 4 + channel % 2 * 8; }

// Row of shared memory for a feature's activations: its place along K in the MMA that reads it, so
// that the eight rows of one matrix follow each other (features 0, 1, 4, 5, 8, 9, 12, 13 of every
// 16, then the others).
FQ_HOST_DEVICE constexpr uint32_t XRow(uint32_t feature) {
  return (feature & ~14u) | (feature >> 1 & 6) | (feature << 2 & 8);
}

// Of a record, in 16 bytes, with the zeros that follow it.
FQ_HOST_DEVICE constexpr uint32_t AlignedRecord(uint32_t num_16bytes) {
  constexpr uint32_t kMultiple = kCopyAlignment / 16;
  return (num_16bytes + kMultiple - 1) / kMultiple * kMultiple;
}

// Where a unit's outliers are: pieces of kMaxPieceBytes and a last, shorter one.
struct OutlierRef {
  uint32_t offset = 0;       // from the start of the outlier part, in 16 bytes
  uint32_t num_16bytes = 0;  // of all pieces; 0: no outliers
};
static_assert(sizeof(OutlierRef) == 8);

// Sizes of a packed layer. Offsets are bytes from the start of its buffer.
struct PackedLayout {
  int32_t n = 0;
  int32_t k = 0;
  int32_t num_strips = 0;
  int32_t num_units = 0;  // of one strip
  int32_t groups_per_chunk = 1;
  bool has_zeros = false;
  int32_t unit_dense_bytes = 0;
  int32_t max_outlier_bytes = 0;  // of the largest unit; 0: the layer has none
  int64_t index_offset = 0;
  int64_t outliers_offset = 0;
  int64_t num_bytes = 0;
};

}  // namespace flashquant::cuda
