// Random outlier slots and small INT4 weights for the Tile-COO tests.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/format/int4_weight.h"
#include "kernels/format/tile_coo_encoder.h"

namespace flashquant {

// Finite value bits that are not +-0.
inline uint16_t RandomValueBits(TileCooValueType type, std::mt19937_64& random) {
  const uint32_t exponent = type == TileCooValueType::kBFloat16 ? 0x7f80u : 0x7c00u;
  while (true) {
    const auto bits = static_cast<uint16_t>(random());
    if ((bits & 0x7fffu) != 0 && (bits & exponent) != exponent) return bits;
  }
}

// Each position is a slot with probability `density`, in a column of `hot_column` (if >= 0) always;
// every fifth slot is marked filler. Order: n fastest.
inline std::vector<TileCooSlot> RandomSlots(const TileCooGeometry& geometry, double density,
                                            std::mt19937_64& random, int64_t hot_column = -1) {
  std::bernoulli_distribution chosen(density);
  std::vector<TileCooSlot> slots;
  for (int64_t k = 0; k < geometry.k; ++k) {
    for (int64_t n = 0; n < geometry.n; ++n) {
      if (n != hot_column && !chosen(random)) continue;
      slots.push_back({static_cast<int32_t>(k), static_cast<int32_t>(n),
                       RandomValueBits(geometry.value_type, random), slots.size() % 5 == 4});
    }
  }
  return slots;
}

// A valid asymmetric weight of random codes; codes at `slots` are the zero point.
inline Int4Weight RandomInt4Weight(int64_t k, int64_t n, int64_t group_size,
                                   const std::vector<TileCooSlot>& slots, std::mt19937_64& random) {
  Int4Weight weight;
  weight.n = n;
  weight.k = k;
  weight.n_padded = RoundUp<int64_t>(n, 8);
  weight.k_padded = RoundUp<int64_t>(k, group_size);
  weight.group_size = group_size;
  const auto num_groups = static_cast<size_t>(weight.n_padded * weight.groups_per_row());
  weight.qweight.resize(static_cast<size_t>(weight.n_padded * weight.k_padded / 2));
  weight.scales.assign(num_groups, ToBFloat16(0.0f));
  weight.zeros.resize(num_groups);
  for (uint8_t& zero : weight.zeros) zero = static_cast<uint8_t>(random() % 16);
  const auto set_code = [&weight](int64_t row_n, int64_t col_k, int32_t code) {
    uint8_t& byte = weight.qweight[static_cast<size_t>(row_n * (weight.k_padded / 2) + col_k / 2)];
    byte = static_cast<uint8_t>(col_k % 2 == 0 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
  };
  for (int64_t row = 0; row < weight.n_padded; ++row) {
    for (int64_t col = 0; col < weight.k_padded; ++col) {
      const bool padding = row >= n || col >= k;
      set_code(
          row, col,
          padding ? weight.ZeroPoint(row, col / group_size) : static_cast<int32_t>(random() % 16));
    }
    for (int64_t g = 0; row < n && g < weight.groups_per_row(); ++g) {
      weight.scales[static_cast<size_t>(row * weight.groups_per_row() + g)] =
          ToBFloat16(0.001f * static_cast<float>(1 + random() % 100));
    }
  }
  for (const TileCooSlot& slot : slots) {
    set_code(slot.n, slot.k, weight.ZeroPoint(slot.n, slot.k / group_size));
  }
  return weight;
}

}  // namespace flashquant
