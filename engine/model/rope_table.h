// Cosines and sines of the rotary embedding for every position, made once at load.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/model/model_config.h"

namespace flashquant {

// Rotation per position of each of the D / 2 pairs, in radians. Linear scaling divides all by the
// factor; llama3 divides the low ones and blends between the two wave lengths that its factors
// name; yarn blends by pair number; dynamic leaves all as they are (model_config.h). Source:
// Hugging Face transformers' rope initialisation for these types.
std::vector<float> RopeInverseFrequencies(const RopeConfig& rope, int32_t head_dim);

// [num_positions, head_dim]: D/2 cosines, then D/2 sines, in float32 as the reference computes
// them; all times `scale`.
std::vector<float> MakeRopeTable(std::span<const float> inverse_frequencies, int32_t num_positions,
                                 double scale = 1.0);

// The table of a model: its frequencies, times its attention factor; for a model without rotary
// positions the rotation by nothing.
std::vector<float> MakeRopeTable(const ModelConfig& config, int32_t num_positions);

}  // namespace flashquant
