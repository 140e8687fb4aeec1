// RMSNorm of the query and key heads, before they are rotated.
#include <cmath>

#include "kernels/cpu/cpu_kernels.h"

namespace flashquant {
namespace {

void NormHead(const float* weight, float epsilon, int64_t head_dim, float* x) {
  double squares = 0;
  for (int64_t i = 0; i < head_dim; ++i) {
    squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  const double mean = squares / static_cast<double>(head_dim);
  const auto factor = static_cast<float>(1.0 / std::sqrt(mean + static_cast<double>(epsilon)));
  for (int64_t i = 0; i < head_dim; ++i) x[i] *= factor * weight[i];
}

}  // namespace

void HeadNormCpu(const HeadNormParams& params, ThreadPool& pool) {
  const int64_t d = params.head_dim;
  const int64_t heads = params.num_heads;
  const int64_t kv_heads = params.num_kv_heads;
  const int64_t width = (heads + 2 * kv_heads) * d;
  ForRows(pool, params.num_tokens, width, [&](int64_t token) {
    float* row = static_cast<float*>(params.qkv) + token * width;
    for (int64_t head = 0; head < heads + kv_heads; ++head) {
      NormHead(static_cast<const float*>(head < heads ? params.q_weight : params.k_weight),
               params.epsilon, d, row + head * d);
    }
  });
}

}  // namespace flashquant
