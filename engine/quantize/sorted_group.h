// A group of weights in ascending order, for judging one (scale, zero point) after the other: what
// a candidate clips is then a run at either end, found without sorting again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/quantize/int4_quantizer.h"

namespace flashquant {

class SortedGroup final {
 public:
  // importance: as many as weights, or empty: all 1.
  void Load(std::span<const float> weights, std::span<const float> importance);

  size_t size() const { return count_; }
  float value(size_t i) const { return values_[i]; }

  // Looks at one candidate; the functions below are about it. Errors are squared and times their
  // importance. "Outside" are those above the square of half a step: more than any weight can have
  // that the candidate does not clip.
  // False, and nothing known, when more than `most_outside` are outside.
  bool Judge(GroupParams params, size_t most_outside);
  std::span<const float> outside() const { return outside_; }  // falling
  float inside() const { return inside_; }                     // sum of all others
  // The sum with the `left_out` largest errors left out.
  float ErrorWithout(size_t left_out);
  // How large the i-th largest inside error is, roughly.
  float EstimateInside(size_t i) const;

 private:
  size_t count_ = 0;
  float peak_ = 3;  // largest inside error over their mean, roughly
  std::vector<uint64_t> keys_;
  std::vector<float> values_;      // ascending, padded with zeros to whole vectors
  std::vector<float> importance_;  // the same order, padded with zeros
  GroupParams params_;
  float inside_ = 0;
  bool weighted_ = false;
  std::vector<float> outside_;
  std::vector<float> from_above_;
  std::vector<float> merged_;
  std::vector<float> errors_;
};

}  // namespace flashquant
