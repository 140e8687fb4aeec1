// LayerNorm with the residual added before it. Sums in double: rows are short beside the linear
// layers around them.
#include <cmath>

#include "kernels/cpu/cpu_kernels.h"

namespace flashquant {
namespace {

void LayerNormRow(const LayerNormParams& params, const float* x, float* residual, float* out) {
  const int64_t hidden = params.hidden;
  const float* source = x;
  if (residual != nullptr) {
    for (int64_t i = 0; i < hidden; ++i) residual[i] += x[i];
    source = residual;
  }
  double sum = 0;
  for (int64_t i = 0; i < hidden; ++i) sum += static_cast<double>(source[i]);
  const double mean = sum / static_cast<double>(hidden);
  double squares = 0;
  for (int64_t i = 0; i < hidden; ++i) {
    const double difference = static_cast<double>(source[i]) - mean;
    squares += difference * difference;
  }
  const double variance = squares / static_cast<double>(hidden);
  const auto factor =
      static_cast<float>(1.0 / std::sqrt(variance + static_cast<double>(params.epsilon)));
  const auto center = static_cast<float>(mean);
  const auto* weight = static_cast<const float*>(params.weight);
  const auto* bias = static_cast<const float*>(params.bias);
  for (int64_t i = 0; i < hidden; ++i) {
    out[i] = (source[i] - center) * factor * weight[i] + bias[i];
  }
}

}  // namespace

void LayerNormCpu(const LayerNormParams& params, ThreadPool& pool) {
  const int64_t hidden = params.hidden;
  ForRows(pool, params.num_rows, hidden, [&](int64_t row) {
    auto* residual = static_cast<float*>(params.residual);
    LayerNormRow(params, static_cast<const float*>(params.x) + row * hidden,
                 residual == nullptr ? nullptr : residual + row * hidden,
                 static_cast<float*>(params.out) + row * hidden);
  });
}

}  // namespace flashquant
