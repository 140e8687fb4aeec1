// Second moments of a linear layer's inputs: H = sum of x x^T over the calibration tokens. The
// squared output error of weights off by E is then sum over rows of e H e^T.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace flashquant {

class Hessian final {
 public:
  Hessian() = default;
  // k^2 doubles.
  explicit Hessian(int64_t k);
  // values: [k, k], symmetric.
  Hessian(int64_t k, std::vector<double> values) : k_(k), values_(std::move(values)) {}

  // Adds rows of inputs [num_rows, k]. The result does not depend, to the last bit, on
  // num_threads; it depends on how the rows are cut into calls.
  void Add(std::span<const float> inputs, int num_threads);

  int64_t k() const { return k_; }
  int64_t num_rows() const { return num_rows_; }
  // [k, k] row-major, symmetric.
  std::span<const double> values() const { return values_; }
  double at(int64_t i, int64_t j) const { return values_[static_cast<size_t>(i * k_ + j)]; }
  bool IsFinite() const;

  // Sum over rows of e H e^T for errors [num_rows, k].
  double Energy(std::span<const float> errors, int num_threads) const;

 private:
  int64_t k_ = 0;
  int64_t num_rows_ = 0;
  std::vector<double> values_;
};

}  // namespace flashquant
