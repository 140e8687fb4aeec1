// Products of one call are summed in float, calls in double. Only the upper half is computed, the
// lower one copied.
#include "engine/quantize/hessian.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/quantize/matrix_multiply.h"
#include "engine/quantize/parallel_for.h"
#include "kernels/base/check.h"
#include "kernels/base/math_util.h"

namespace flashquant {
namespace {

constexpr int64_t kTile = 128;
constexpr int64_t kRowsPerTask = 64;

}  // namespace

Hessian::Hessian(int64_t k) : k_(k), values_(static_cast<size_t>(k * k), 0.0) {}

void Hessian::Add(std::span<const float> inputs, int num_threads) {
  const int64_t rows = static_cast<int64_t>(inputs.size()) / k_;
  FQ_CHECK(rows * k_ == static_cast<int64_t>(inputs.size()));
  num_rows_ += rows;
  const int64_t tiles = CeilDiv(k_, kTile);
  ParallelFor(num_threads, tiles * tiles, 1, [&](int64_t task, int64_t) {
    const int64_t i0 = task / tiles * kTile;
    const int64_t j0 = task % tiles * kTile;
    if (j0 < i0) return;
    const int64_t height = std::min(kTile, k_ - i0);
    const int64_t width = std::min(kTile, k_ - j0);
    std::vector<float> products(static_cast<size_t>(kTile * kTile), 0.0f);
    MultiplyAdd(height, width, rows, 1.0f, {inputs.data() + i0, 1, k_}, inputs.data() + j0, k_,
                products.data(), kTile);
    for (int64_t i = 0; i < height; ++i) {
      for (int64_t j = i0 == j0 ? i : 0; j < width; ++j) {
        double& upper = values_[static_cast<size_t>((i0 + i) * k_ + j0 + j)];
        upper += static_cast<double>(products[static_cast<size_t>(i * kTile + j)]);
        values_[static_cast<size_t>((j0 + j) * k_ + i0 + i)] = upper;
      }
    }
  });
}

bool Hessian::IsFinite() const {
  return std::all_of(values_.begin(), values_.end(), [](double v) { return std::isfinite(v); });
}

double Hessian::Energy(std::span<const float> errors, int num_threads) const {
  const int64_t rows = static_cast<int64_t>(errors.size()) / k_;
  std::vector<double> row_energy(static_cast<size_t>(rows));
  ParallelFor(num_threads, rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    const std::vector<double> part(errors.begin() + begin * k_, errors.begin() + end * k_);
    std::vector<double> product(part.size(), 0.0);
    MultiplyAdd(end - begin, k_, k_, 1.0, {part.data(), k_, 1}, values_.data(), k_, product.data(),
                k_);
    for (int64_t row = begin; row < end; ++row) {
      const size_t at = static_cast<size_t>((row - begin) * k_);
      row_energy[static_cast<size_t>(row)] =
          std::inner_product(part.begin() + static_cast<std::ptrdiff_t>(at),
                             part.begin() + static_cast<std::ptrdiff_t>(at) + k_,
                             product.begin() + static_cast<std::ptrdiff_t>(at), 0.0);
    }
  });
  return std::accumulate(row_energy.begin(), row_energy.end(), 0.0);
}

}  // namespace flashquant
