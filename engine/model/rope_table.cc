#include "engine/model/rope_table.h"

#include <cmath>

#include "engine/base/llama3_rope.h"

namespace flashquant {
std::vector<float> RopeInverseFrequencies(const RopeConfig& rope, int32_t head_dim) {
  const Llama3RopeScaling llama3{
      .factor = rope.factor,
      .low_freq_factor = rope.low_freq_factor,
      .high_freq_factor = rope.high_freq_factor,
      .original_max_position = static_cast<double>(rope.original_max_position)};
  std::vector<float> frequencies(static_cast<size_t>(head_dim / 2));
  for (size_t pair = 0; pair < frequencies.size(); ++pair) {
    double frequency = 1.0 / std::pow(rope.theta, 2.0 * static_cast<double>(pair) / head_dim);
    if (rope.type == RopeType::kLinear) frequency /= rope.factor;
    if (rope.type == RopeType::kLlama3) frequency = Llama3RopeFrequency(llama3, frequency);
    frequencies[pair] = static_cast<float>(frequency);
  }
  return frequencies;
}

std::vector<float> MakeRopeTable(std::span<const float> inverse_frequencies,
                                 int32_t num_positions) {
  const size_t half = inverse_frequencies.size();
  std::vector<float> table(static_cast<size_t>(num_positions) * 2 * half);
  for (size_t position = 0; position < static_cast<size_t>(num_positions); ++position) {
    float* row = table.data() + position * 2 * half;
    for (size_t pair = 0; pair < half; ++pair) {
      const float angle = static_cast<float>(position) * inverse_frequencies[pair];
      row[pair] = std::cos(angle);
      row[half + pair] = std::sin(angle);
    }
  }
  return table;
}

}  // namespace flashquant
