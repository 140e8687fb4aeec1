// Turns a weight in the fused kernel's form into a BF16 matrix, for products with more rows than
// the fused kernel is for.
//
// The form is read through tables that are made by asking the packer's own rules (pack_rules.h)
// where they put each code, scale and outlier: there is one description of the form, not two.
#pragma once

#include <cuda_runtime_api.h>

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

// matrix[n, k] = dequant(W_Q) + W_O, row-major BF16 [layout.n, layout.k], one rounding; k even.
// `weight`: layout.num_bytes, `tables`: both in device memory. Queues on `stream`.
cudaError_t LaunchUnpackWeight(const PackedLayout& layout, const uint8_t* weight,
                               const UnpackTables* tables, void* matrix, cudaStream_t stream);

}  // namespace flashquant::cuda
