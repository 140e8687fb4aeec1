// RMSNorm with the residual added before it.
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rms_norm.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include <cmath>

#include "hwy/highway.h"
#include "kernels/cpu/cpu_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// residual may be null; out may be x.
void RmsNormRow(const float* x, float* residual, const float* weight, float epsilon, int64_t hidden,
                float* out) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* source = x;
  if (residual != nullptr) {
    int64_t i = 0;
    for (; i + lanes <= hidden; i += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, residual + i), hn::LoadU(d, x + i)), d, residual + i);
    }
    for (; i < hidden; ++i) residual[i] += x[i];
    source = residual;
  }
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= hidden; i += 2 * lanes) {
    const auto a = hn::LoadU(d, source + i);
    const auto b = hn::LoadU(d, source + i + lanes);
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < hidden; ++i) sum += source[i] * source[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(hidden) + epsilon);
  const auto factors = hn::Set(d, factor);
  for (i = 0; i + lanes <= hidden; i += lanes) {
    const auto normal = hn::Mul(hn::LoadU(d, source + i), factors);
    hn::StoreU(hn::Mul(normal, hn::LoadU(d, weight + i)), d, out + i);
  }
  for (; i < hidden; ++i) out[i] = source[i] * factor * weight[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashquant {

HWY_EXPORT(RmsNormRow);

void RmsNormCpu(const RmsNormParams& params, ThreadPool& pool) {
  const int64_t hidden = params.hidden;
  ForRows(pool, params.num_rows, hidden, [&](int64_t row) {
    float* residual = static_cast<float*>(params.residual);
    HWY_DYNAMIC_DISPATCH(RmsNormRow)
    (static_cast<const float*>(params.x) + row * hidden,
     residual == nullptr ? nullptr : residual + row * hidden,
     static_cast<const float*>(params.weight), params.epsilon, hidden,
     static_cast<float*>(params.out) + row * hidden);
  });
}

}  // namespace flashquant
#endif  // HWY_ONCE
