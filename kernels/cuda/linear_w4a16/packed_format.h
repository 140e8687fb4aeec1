// The form in which the fused W4A16 + outlier kernel reads a weight: records, units, rows, plans.
// Plain structs shared by the host packer (pack.h), the planner (plan.h) and the kernel. A cache
// made at load from the canonical arrays, never a file format.
//
// Dense record = the codes of 32 output channels (a strip) x 128 input features (a chunk): 4 pairs
// of k16 steps x 512 bytes of codes, then per quantization group in the chunk (G = 1, 2 or 4; a
// group of 128 or more counts as one per chunk) 64 bytes of scales, then, with zero points, G x 64
// bytes of 128 + z.
//   Codes: the 16 bytes of lane (g, t) in a pair of steps are four words: step 0 block 0, step 0
//   block 1, step 1 block 0, step 1 block 1 (blocks of 16 channels). Bits 4r + 16h .. + 3 of a word
//   are register r, half h of the MMA's A fragment: channel g + 8 * (r % 2), feature
//   2t + h + 8 * (r / 2). Scales and zero points: BF16, [g][block][channel g, channel g + 8].
//
// Outlier record = outliers of a strip x 8 chunks (a window), at most kMaxFragments fragments; a
// window has as many such records as it needs, behind its dense ones: a 16-byte header whose byte i
// is the number of fragments of octets 0..i (an octet is 8 channels), then the fragments.
//   Fragment: eight outliers of one octet, octets in ascending order. Four pairs of slots, 8 bytes
//   each: {u16 position of slot 2t, of slot 2t + 1, u16 value of each}, where position = (feature
//   in the window) * 16 + (channel in the octet). Every outlier is one column of an MMA whose A
//   fragment is zero elsewhere, and its x row is fetched by ldmatrix with per-lane addresses
//   (design "kernel", strategy 3b).
//   Deviation from 3b: one outlier per slot instead of one slot per distinct feature. At 1 to 3%
//   the slots of 3b hold 14 to 18.5 outliers of 16 anyway, and this form needs no lane masks.
// A record is one contiguous range, so that one copy brings it; so are a window's dense records.

#pragma once

#include <cstdint>

namespace flashquant::cuda {

inline constexpr int kStripN = 32;
inline constexpr int kChunkK = 128;
inline constexpr int kBlocksPerStrip = 2;
inline constexpr int kCodeBytes = kStripN * kChunkK / 2;
inline constexpr int kGroupScaleBytes = kStripN * 2;
inline constexpr int kWindowChunks = 8;
inline constexpr int kOctetsPerStrip = 4;
inline constexpr int kSlotsPerFragment = 8;
inline constexpr int kFragmentBytes = 32;
inline constexpr int kMaxFragments = 32;
inline constexpr int kOutlierHeaderBytes = 16;
inline constexpr int kMaxUnitChunks = 2;      // dense records that one copy brings together
inline constexpr int kRowsPerBatchBlock = 8;  // batch rows of one MMA
inline constexpr int kMaxWarpsPerBlock = 16;
inline constexpr int kPlanUnits = 4;

constexpr int DenseBytes(int groups_per_chunk, bool has_zeros) {
  return kCodeBytes + groups_per_chunk * kGroupScaleBytes * (has_zeros ? 2 : 1);
}

// One copy to process: one outlier record, or up to kMaxUnitChunks dense ones. A row is a strip
// within a K slice (whole windows); its units stand together.
struct Unit {
  uint32_t offset = 0;  // in 16 bytes
  uint32_t flags = 0;   // fields below
};
inline constexpr uint32_t kUnitSizeMask = 0x3ff;  // bytes / 16
inline constexpr int kUnitChunkShift = 10;        // first chunk (of the window) inside the slice
inline constexpr uint32_t kUnitChunkMask = 0xfff;
inline constexpr int kUnitDenseShift = 22;  // dense records; 0: an outlier record
inline constexpr uint32_t kUnitDenseMask = 3;
inline constexpr uint32_t kUnitRowStart = 1u << 24;
inline constexpr uint32_t kUnitRowEnd = 1u << 25;
inline constexpr int kMaxRecordBytes = kUnitSizeMask * 16;

// What one warp does: units [unit_begin, unit_begin + num_units), the first in row `row_begin`. 64
// bytes, so that one load tells a starting warp all it needs for its first copies.
struct WarpPlan {
  uint32_t unit_begin = 0;
  uint32_t num_units = 0;
  uint32_t row_begin = 0;
  uint32_t first_slot =
      kNoSlot;               // where a row that this warp does not begin goes, see stream_k.cuh
  uint32_t slice_chunk = 0;  // first chunk of the block's K slice, in the whole K
  uint32_t slice_chunks = 0;
  uint32_t x_chunk_begin = 0;  // chunks of the slice that the block needs, cyclically
  uint32_t x_num_chunks = 0;
  Unit units[kPlanUnits];

  static constexpr uint32_t kNoSlot = 0xffffffffu;
};
static_assert(sizeof(WarpPlan) == 64);

// Where the sums of a row go. Pieces of a strip are numbered from strip_piece; the piece of block c
// in this row is row_piece + (c - first_block). One piece: no workspace is used.
struct RowInfo {
  uint32_t row_piece = 0;
  uint32_t first_block = 0;
  uint32_t strip_piece = 0;
  uint32_t strip_pieces = 0;
};
static_assert(sizeof(RowInfo) == 16);

}  // namespace flashquant::cuda
