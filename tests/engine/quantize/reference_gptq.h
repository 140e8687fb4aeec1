// A layer with correlated inputs and planted heavy tails, and a straightforward double-precision
// GPTQ/SpQR written after the papers (Frantar et al. 2022, Dettmers et al. 2023), for the tests and
// the benchmark of the quantizer. Shares no code with it but the matrix of second moments.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "engine/quantize/hessian.h"

namespace flashquant {

struct SyntheticLayer {
  int64_t n = 0;
  int64_t k = 0;
  std::vector<float> weights;  // [n, k]
  std::vector<float> inputs;   // [rows, k]
  Hessian hessian;
};

inline SyntheticLayer MakeLayer(int64_t n, int64_t k, int64_t rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  SyntheticLayer layer;
  layer.n = n;
  layer.k = k;
  for (int64_t i = 0; i < n * k; ++i) {
    layer.weights.push_back(0.02f * normal(random) * (uniform(random) < 0.01f ? 8.0f : 1.0f));
  }
  // Inputs share a few directions, and some columns are much larger than the others.
  constexpr int kDirections = 8;
  std::vector<float> mix(static_cast<size_t>(kDirections * k));
  for (float& value : mix) value = normal(random);
  for (int64_t row = 0; row < rows; ++row) {
    float common[kDirections];
    for (float& value : common) value = normal(random);
    for (int64_t i = 0; i < k; ++i) {
      float value = normal(random);
      for (int d = 0; d < kDirections; ++d)
        value += 0.7f * common[d] * mix[static_cast<size_t>(d * k + i)];
      layer.inputs.push_back(value * (i % 41 == 3 ? 12.0f : 1.0f));
    }
  }
  layer.hessian = Hessian(k);
  layer.hessian.Add(layer.inputs, 2);
  return layer;
}

// GPTQ as published: the inverse Hessian's upper Cholesky factor, columns in order, each error
// spread over the columns to its right; min-max scales per group from the weights as updated. With
// `outliers` > 0, so many of each group's weights with the largest error^2 / diag^2 are left out of
// the scale and kept, as SpQR does.
class ReferenceGptq final {
 public:
  ReferenceGptq(const SyntheticLayer& layer, double damping)
      : layer_(layer), k_(static_cast<size_t>(layer.k)) {
    std::vector<double> hessian(layer.hessian.values().begin(), layer.hessian.values().end());
    double mean = 0;
    for (size_t i = 0; i < k_; ++i) mean += hessian[i * k_ + i] / static_cast<double>(k_);
    for (size_t i = 0; i < k_; ++i) hessian[i * k_ + i] += damping * mean;
    const std::vector<double> lower = Cholesky(hessian);
    upper_ = Transpose(Cholesky(InverseFrom(lower)));
  }

  std::vector<double> Run(size_t group_size, size_t outliers) const {
    return Run(group_size, outliers, layer_.n);
  }

  // Of the first `num_rows` rows only, which do not depend on the others.
  std::vector<double> Run(size_t group_size, size_t outliers, int64_t num_rows) const {
    std::vector<double> result(static_cast<size_t>(num_rows) * k_);
    for (size_t n = 0; n < static_cast<size_t>(num_rows); ++n) {
      std::vector<double> w(layer_.weights.begin() + static_cast<std::ptrdiff_t>(n * k_),
                            layer_.weights.begin() + static_cast<std::ptrdiff_t>((n + 1) * k_));
      double scale = 0;
      double zero = 0;
      std::vector<bool> kept(k_, false);
      for (size_t i = 0; i < k_; ++i) {
        if (i % group_size == 0) FitGroup(w, i, group_size, outliers, &kept, &scale, &zero);
        const double q = kept[i] ? w[i] : Round(w[i], scale, zero);
        result[n * k_ + i] = q;
        const double error = (w[i] - q) / upper_[i * k_ + i];
        for (size_t j = i; j < k_; ++j) w[j] -= error * upper_[i * k_ + j];
      }
    }
    return result;
  }

 private:
  static double Round(double w, double scale, double zero) {
    return scale * (std::clamp(std::nearbyint(w / scale) + zero, 0.0, 15.0) - zero);
  }
  void FitGroup(const std::vector<double>& w, size_t begin, size_t group_size, size_t outliers,
                std::vector<bool>* kept, double* scale, double* zero) const {
    const size_t end = std::min(begin + group_size, k_);
    const auto fit = [&] {
      double low = 0;
      double high = 0;
      for (size_t i = begin; i < end; ++i) {
        if ((*kept)[i]) continue;
        low = std::min(low, w[i]);
        high = std::max(high, w[i]);
      }
      *scale = std::max((high - low) / 15, 1e-9);
      *zero = std::nearbyint(-low / *scale);
    };
    fit();
    if (outliers == 0) return;
    // One by one: the weight that with its own group's scale gone from it gains most.
    for (size_t picked = 0; picked < outliers; ++picked) {
      size_t best = begin;
      double best_error = HUGE_VAL;
      for (size_t candidate = begin; candidate < end; ++candidate) {
        if ((*kept)[candidate]) continue;
        (*kept)[candidate] = true;
        fit();
        double error = 0;
        for (size_t i = begin; i < end; ++i) {
          if ((*kept)[i]) continue;
          const double difference = (w[i] - Round(w[i], *scale, *zero)) / upper_[i * k_ + i];
          error += difference * difference;
        }
        (*kept)[candidate] = false;
        if (error < best_error) {
          best_error = error;
          best = candidate;
        }
      }
      (*kept)[best] = true;
    }
    fit();
  }
  // Lower triangular l with l l^T = matrix; the column found so far leaves the rest of the matrix.
  std::vector<double> Cholesky(std::vector<double> rest) const {
    std::vector<double> lower(k_ * k_, 0.0);
    for (size_t p = 0; p < k_; ++p) {
      const double pivot = std::sqrt(rest[p * k_ + p]);
      for (size_t i = p; i < k_; ++i) lower[i * k_ + p] = rest[p * k_ + i] / pivot;
      for (size_t i = p + 1; i < k_; ++i) {
        const double factor = lower[i * k_ + p] / pivot;
        for (size_t j = i; j < k_; ++j) rest[i * k_ + j] -= factor * rest[p * k_ + j];
      }
    }
    return lower;
  }
  // Of the matrix whose Cholesky factor is `lower`: column after column of the identity solved.
  std::vector<double> InverseFrom(const std::vector<double>& lower) const {
    const std::vector<double> upper = Transpose(lower);
    std::vector<double> inverse(k_ * k_, 0.0);
    for (size_t column = 0; column < k_; ++column) {
      double* x = inverse.data() + column * k_;  // the inverse is symmetric
      x[column] = 1;
      for (size_t i = column; i < k_; ++i) {
        x[i] /= upper[i * k_ + i];
        for (size_t p = i + 1; p < k_; ++p) x[p] -= upper[i * k_ + p] * x[i];
      }
      for (size_t i = k_; i-- > 0;) {
        x[i] /= lower[i * k_ + i];
        for (size_t p = 0; p < i; ++p) x[p] -= lower[i * k_ + p] * x[i];
      }
    }
    return inverse;
  }
  std::vector<double> Transpose(const std::vector<double>& matrix) const {
    std::vector<double> result(matrix.size());
    for (size_t i = 0; i < k_; ++i) {
      for (size_t j = 0; j < k_; ++j) result[j * k_ + i] = matrix[i * k_ + j];
    }
    return result;
  }

  const SyntheticLayer& layer_;
  const size_t k_;
  std::vector<double> upper_;
};

}  // namespace flashquant
