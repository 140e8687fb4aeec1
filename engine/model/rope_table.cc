#include "engine/model/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/base/llama3_rope.h"

namespace flashquant {
namespace {

// How far yarn goes from dividing a pair's frequency (0) to leaving it (1).
class YarnRamp final {
 public:
  YarnRamp(const RopeConfig& rope, int32_t head_dim) {
    const auto pair_of = [&](double rotations) {
      return head_dim * std::log(rope.original_max_position / (rotations * 2 * std::numbers::pi)) /
             (2 * std::log(rope.theta));
    };
    low_ = pair_of(rope.beta_fast);
    high_ = pair_of(rope.beta_slow);
    if (rope.truncate) {
      low_ = std::floor(low_);
      high_ = std::ceil(high_);
    }
    low_ = std::max(low_, 0.0);
    high_ = std::min(high_, static_cast<double>(head_dim - 1));
    if (low_ == high_) high_ += 0.001;
  }
  double KeptShare(size_t pair) const {
    return 1 - std::clamp((static_cast<double>(pair) - low_) / (high_ - low_), 0.0, 1.0);
  }

 private:
  double low_ = 0;
  double high_ = 0;
};

}  // namespace

std::vector<float> RopeInverseFrequencies(const RopeConfig& rope, int32_t head_dim) {
  const Llama3RopeScaling llama3{
      .factor = rope.factor,
      .low_freq_factor = rope.low_freq_factor,
      .high_freq_factor = rope.high_freq_factor,
      .original_max_position = static_cast<double>(rope.original_max_position)};
  const YarnRamp yarn(rope, head_dim);
  std::vector<float> frequencies(static_cast<size_t>(head_dim / 2));
  for (size_t pair = 0; pair < frequencies.size(); ++pair) {
    double frequency = 1.0 / std::pow(rope.theta, 2.0 * static_cast<double>(pair) / head_dim);
    if (rope.type == RopeType::kLinear) frequency /= rope.factor;
    if (rope.type == RopeType::kLlama3) frequency = Llama3RopeFrequency(llama3, frequency);
    if (rope.type == RopeType::kYarn) {
      const double kept = yarn.KeptShare(pair);
      frequency = frequency / rope.factor * (1 - kept) + frequency * kept;
    }
    frequencies[pair] = static_cast<float>(frequency);
  }
  return frequencies;
}

std::vector<float> MakeRopeTable(std::span<const float> inverse_frequencies, int32_t num_positions,
                                 double scale) {
  const auto factor = static_cast<float>(scale);
  const size_t half = inverse_frequencies.size();
  std::vector<float> table(static_cast<size_t>(num_positions) * 2 * half);
  for (size_t position = 0; position < static_cast<size_t>(num_positions); ++position) {
    float* row = table.data() + position * 2 * half;
    for (size_t pair = 0; pair < half; ++pair) {
      const float angle = static_cast<float>(position) * inverse_frequencies[pair];
      row[pair] = std::cos(angle) * factor;
      row[half + pair] = std::sin(angle) * factor;
    }
  }
  return table;
}

std::vector<float> MakeRopeTable(const ModelConfig& config, int32_t num_positions) {
  if (config.family == DecoderFamily::kOpt) {
    const std::vector<float> still(static_cast<size_t>(config.head_dim / 2), 0.0f);
    return MakeRopeTable(still, num_positions);
  }
  return MakeRopeTable(RopeInverseFrequencies(config.rope, config.head_dim), num_positions,
                       config.rope.attention_factor);
}

}  // namespace flashquant
