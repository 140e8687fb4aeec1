// Where the fused kernel's form of a weight holds each code and outlier, for those who unpack it.
// What of it can be asked of the packer's own rules (pack_rules.h) is a table, so that there is one
// description of the form and not two. Needs no CUDA.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear_w4a16/packed_format.h"
#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

inline constexpr int kSlotPositions = kStripN * kUnitK;  // of a unit's outliers
inline constexpr int kSlotPlaceBits = 8;                 // kUnitK = 256 features

// A lane's 16 bytes of a pair of k16 steps are four words of codes; register r of a word has two
// codes, of neighbouring features, from bits 4r and 4r + 16 on. Their channel in the strip:
FQ_HOST_DEVICE constexpr uint32_t CodeChannel(uint32_t lane, uint32_t word, uint32_t r) {
  return lane / 4 * 4 + r % 2 * 2 + word % 2;
}
// The first one's feature in the chunk.
FQ_HOST_DEVICE constexpr uint32_t CodeFeature(uint32_t pair, uint32_t lane, uint32_t word,
                                              uint32_t r) {
  return pair * 32 + word / 2 * 16 + lane % 4 * 4 + r / 2 * 2;
}

// Plain data, the same for every weight.
struct alignas(16) UnpackTables {
  // [position]: channel << kSlotPlaceBits | feature, in the unit.
  uint16_t slot_place[kSlotPositions] = {};
};

// Host arithmetic.
UnpackTables MakeUnpackTables();

}  // namespace flashquant::cuda
