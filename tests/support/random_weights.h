// Seeded random weights and inputs for kernel tests and benchmarks.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "kernels/backend.h"

namespace flashquant {

std::vector<float> RandomFloats(int64_t count, float deviation, uint64_t seed);

struct RandomLinearOptions {
  int64_t n = 0;
  int64_t k = 0;
  DType dense_dtype = DType::kF32;  // when not int4
  bool int4 = true;
  int64_t group_size = 128;  // -1: one group per row
  bool symmetric = false;
  double density = 0.0;  // of outliers, replace semantics; 0 = none
  bool bias = false;
  uint64_t seed = 1;
};

// Owns what a LinearPart points to.
class RandomLinear final {
 public:
  explicit RandomLinear(const RandomLinearOptions& options);
  LinearPart part() const;
  Int4Weight& int4() { return *int4_; }

 private:
  RandomLinearOptions options_;
  std::unique_ptr<Int4Weight> int4_;
  std::unique_ptr<TileCooMatrix> outliers_;
  std::vector<uint8_t> dense_;
  std::vector<BFloat16> row_scales_;
  std::vector<BFloat16> bias_;
};

}  // namespace flashquant
