// The frequency rule of Llama 3.1's rope scaling: the model turns by it, and the GGUF importer
// recognises a file's divisors with it.
#pragma once

#include <numbers>

namespace flashquant {

// Parameters as rope_scaling of config.json names them; all positive, high above low.
struct Llama3RopeScaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position = 0.0;
};

// The scaled form of `frequency` (radians per position): wave lengths above original/low are
// stretched by `factor`, below original/high left alone, and those between interpolated. Source:
// Hugging Face transformers' rope initialisation.
inline double Llama3RopeFrequency(const Llama3RopeScaling& scaling, double frequency) {
  const double original = scaling.original_max_position;
  const double wave_length = 2.0 * std::numbers::pi / frequency;
  if (wave_length > original / scaling.low_freq_factor) return frequency / scaling.factor;
  if (wave_length < original / scaling.high_freq_factor) return frequency;
  const double smooth = (original / wave_length - scaling.low_freq_factor) /
                        (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1.0 - smooth) * frequency / scaling.factor + smooth * frequency;
}

}  // namespace flashquant
