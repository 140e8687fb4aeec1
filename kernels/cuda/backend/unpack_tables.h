// Where the fused kernel's form of a weight holds each code, scale and outlier, as tables: made by
// asking the packer's own rules (pack_rules.h), so that there is one description of the form and
// not two. Needs no CUDA.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

inline constexpr int kUnpackWords = kCodeBytes / 4;      // of a chunk's codes
inline constexpr int kSlotPositions = kStripN * kUnitK;  // of a unit's outliers
inline constexpr int kCodePlaceBits = 7;                 // kChunkK = 128 features
inline constexpr int kSlotPlaceBits = 8;                 // kUnitK = 256 features

// Plain data, the same for every weight.
struct alignas(16) UnpackTables {
  // [word][nibble], lowest first: channel << kCodePlaceBits | feature, in the chunk.
  uint16_t code_place[kUnpackWords][8] = {};
  // [position]: channel << kSlotPlaceBits | feature, in the unit.
  uint16_t slot_place[kSlotPositions] = {};
  // [channel]: its entry among the kStripN scales (and zero points) of a group.
  uint16_t scale_entry[kStripN] = {};
  // A stored word of codes is the codes exclusive-or this.
  uint32_t code_flip = 0;
};

// Host arithmetic.
UnpackTables MakeUnpackTables();

}  // namespace flashquant::cuda
