// A handful of scales around max / 127 is tried; a full search gains nothing at 8 bits.
#include "engine/quantize/table_quantizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashquant {
namespace {

constexpr float kMaxCode = 127.0f;

float CodeOf(float weight, float scale) {
  return std::clamp(std::nearbyint(weight / scale), -kMaxCode, kMaxCode);
}

}  // namespace

BFloat16 QuantizeTableRow(std::span<const float> row, std::span<int8_t> codes) {
  float largest = 0;
  for (const float weight : row) largest = std::max(largest, std::fabs(weight));
  std::fill(codes.begin(), codes.end(), int8_t{0});
  const uint16_t full = ToBFloat16(largest / kMaxCode).bits;
  if (largest < 0x1p-40f) return BFloat16{};

  // The rounded scale may be a little too small or too large for the largest weight; its neighbours
  // may fit the others better.
  BFloat16 best;
  double best_error = std::numeric_limits<double>::infinity();
  for (int step = -4; step <= 1; ++step) {
    const BFloat16 candidate{static_cast<uint16_t>(full + step)};
    const float scale = ToFloat(candidate);
    double error = 0;
    for (const float weight : row) {
      const double difference = static_cast<double>(weight - scale * CodeOf(weight, scale));
      error += difference * difference;
    }
    if (error < best_error) {
      best_error = error;
      best = candidate;
    }
  }
  for (size_t i = 0; i < row.size(); ++i) {
    codes[i] = static_cast<int8_t>(CodeOf(row[i], ToFloat(best)));
  }
  return best;
}

}  // namespace flashquant
