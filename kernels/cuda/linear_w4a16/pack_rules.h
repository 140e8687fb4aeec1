// What the host packer and the device packer must agree on to the bit: every word of the form that
// packed_format.h describes, and the order of outlier slots, as functions that both call.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear_w4a16/pack.h"
#include "kernels/cuda/linear_w4a16/packed_format.h"
#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

inline constexpr int kBankClasses = 8;  // rows of x with equal index % 8 share a bank group
inline constexpr int kMmaSlots = 16;    // slots of one MMA: four quads
inline constexpr int kCodeWordsPerChunk = kCodeBytes / 4;
inline constexpr uint16_t kZeroPoint8AsBf16 = 0x4308;

// ---- Dense ----

// Two codes, the lower feature in the low nibble; outside the arrays 8, which is 0 less its zero.
FQ_HOST_DEVICE inline uint32_t CodePair(const Int4Arrays& weight, int64_t n, int64_t k) {
  if (n >= weight.n_padded || k >= weight.k_padded) return 0x88;
  return weight.qweight[n * (weight.k_padded / 2) + k / 2];
}

// Word `index` of the codes of the chunk that begins at channel n0, feature k0.
FQ_HOST_DEVICE inline uint32_t CodeWord(const Int4Arrays& weight, int64_t n0, int64_t k0,
                                        int index) {
  const int pair = index / 128;
  const int lane = index / 4 % 32;
  const int step = index / 2 % 2;
  const int half = index % 2;
  uint32_t word = 0;
  for (int r = 0; r < 4; ++r) {
    const uint32_t codes = CodePair(weight, n0 + lane / 4 * 4 + 2 * (r % 2) + half,
                                    k0 + 32 * pair + 16 * step + 4 * (lane % 4) + 2 * (r / 2));
    word |= (codes & 0xf) << (4 * r) | (codes >> 4) << (4 * r + 16);
  }
  return word;
}

// Scales and zero points of a chunk, 2 bytes each, in stored order.
FQ_HOST_DEVICE inline int ScaleEntriesPerChunk(const PackedLayout& layout) {
  return layout.groups_per_chunk * kStripN * (layout.has_zeros ? 2 : 1);
}

FQ_HOST_DEVICE inline uint16_t ScaleEntry(const Int4Arrays& weight, const PackedLayout& layout,
                                          int64_t n0, int64_t k0, int index) {
  const bool is_scale = index < layout.groups_per_chunk * kStripN;
  const int group = index / kStripN % layout.groups_per_chunk;
  const int64_t n = n0 + index % kStripN;
  const int64_t k = k0 + group * (kChunkK / layout.groups_per_chunk);
  if (n >= weight.n_padded || k >= weight.k_padded) return is_scale ? 0 : kZeroPoint8AsBf16;
  const int64_t at = n * (weight.k_padded / weight.group_size) + k / weight.group_size;
  return is_scale ? weight.scales[at] : static_cast<uint16_t>(0x4300 | weight.zeros[at]);
}

// ---- Outliers ----

// A BF16 value as it is stored; what would be less than the smallest normal number is zero, which
// is left out.
FQ_HOST_DEVICE constexpr uint16_t StoredOutlier(uint32_t bits) {
  const uint32_t exponent = bits >> 7 & 0xff;
  if (exponent == 0xff) return static_cast<uint16_t>(bits);  // not finite, and stays so
  return static_cast<uint16_t>(exponent > kOutlierExponent ? bits - (kOutlierExponent << 7) : 0);
}

// Feature inside the unit, channel inside the strip.
FQ_HOST_DEVICE constexpr uint16_t SlotPosition(uint32_t feature, uint32_t channel) {
  return static_cast<uint16_t>(RowOf(channel) | XRow(feature) << 4 | BlockOf(channel) << 12);
}

FQ_HOST_DEVICE constexpr int BankClass(uint32_t position) {
  return static_cast<int>(position >> 4) % kBankClasses;
}

// Slots of a block stand by class, then position, then where Tile-COO has them, before they are
// ordered for banks; this compares the first two.
FQ_HOST_DEVICE constexpr uint32_t SlotSortKey(uint32_t position) {
  return static_cast<uint32_t>(BankClass(position)) << 16 | position;
}

FQ_HOST_DEVICE constexpr int QuadsOf(int slots) {
  return (slots + kSlotsPerQuad - 1) / kSlotsPerQuad;
}

// Of a unit with so many slots.
FQ_HOST_DEVICE constexpr uint32_t RecordBytes(int slots) {
  if (slots == 0) return 0;
  const int last = (slots - 1) % kMaxPieceSlots + 1;
  return static_cast<uint32_t>((slots - last) / kMaxPieceSlots * kMaxPieceBytes +
                               (QuadsOf(last) + 1) * kQuadBytes);
}

// The first four bytes of a piece's trailer, for `first` slots of block 0 among `slots`.
FQ_HOST_DEVICE constexpr uint32_t TrailerWord(int first, int slots) {
  const int second = first / kSlotsPerQuad;
  const int second_quads = QuadsOf(slots) - second;
  const int longer = QuadsOf(first) > second_quads ? QuadsOf(first) : second_quads;
  return static_cast<uint32_t>(second * kQuadBytes) | static_cast<uint32_t>(longer * kQuadBytes)
                                                          << 16;
}

// Orders a block's slots, of which the first stands at `begin` in its piece, so that the eight
// 16-byte rows of x that one ldmatrix phase reads lie in different banks as far as possible.
// `class_begin` [kBankClasses + 1]: where each class begins among the sorted slots; order[i]
// becomes the index, among the sorted slots, of the block's slot i. An MMA takes 16 slots from the
// quad on in which the block begins; slots 0, 1 of each quad are its first matrix and 2, 3 its
// second.
FQ_HOST_DEVICE inline void OrderForBanks(int begin, const uint16_t* class_begin, uint16_t* order) {
  int next[kBankClasses];
  for (int c = 0; c < kBankClasses; ++c) next[c] = class_begin[c];
  const int skipped = begin % kSlotsPerQuad;  // slots of the block before, in the first quad
  const int end = skipped + class_begin[kBankClasses];
  for (int mma = 0; mma < end; mma += kMmaSlots) {
    for (int matrix = 0; matrix < 2; ++matrix) {
      uint32_t taken = 0;  // bit c: class c has a row in this matrix
      for (int i = 0; i < kMmaSlots; ++i) {
        const int at = mma + i;
        if (i / 2 % 2 != matrix || at < skipped || at >= end) continue;
        int best = 0;  // a class not taken, of these the one with most slots left
        int best_score = -1;
        for (int c = 0; c < kBankClasses; ++c) {
          const int remaining = class_begin[c + 1] - next[c];
          const int score = remaining + ((taken >> c & 1) != 0 ? 0 : 1 << 16);
          if (remaining > 0 && score > best_score) {
            best = c;
            best_score = score;
          }
        }
        taken |= 1u << best;
        order[at - skipped] = static_cast<uint16_t>(next[best]++);
      }
    }
  }
}

}  // namespace flashquant::cuda
