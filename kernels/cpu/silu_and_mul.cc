// SwiGLU's pointwise part: silu(gate) * up.
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/silu_and_mul.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/cpu/cpu_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Any vector length gives the same lanes, so that the tail may go one by one.
template <class D>
HWY_INLINE hn::Vec<D> SiluMul(D d, hn::Vec<D> gate, hn::Vec<D> up) {
  // Past 88 exp leaves float's range, where silu is 0 for any purpose; NaN comes through the
  // product with gate.
  const auto exponent = hn::Min(hn::Neg(gate), hn::Set(d, 88.0f));
  const auto sigmoid = hn::Div(hn::Set(d, 1.0f), hn::Add(hn::Set(d, 1.0f), hn::Exp(d, exponent)));
  return hn::Mul(hn::Mul(gate, sigmoid), up);
}

void SiluAndMulRow(const float* gate_up, int64_t intermediate, float* out) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* up = gate_up + intermediate;
  int64_t i = 0;
  for (; i + lanes <= intermediate; i += lanes) {
    hn::StoreU(SiluMul(d, hn::LoadU(d, gate_up + i), hn::LoadU(d, up + i)), d, out + i);
  }
  const hn::CappedTag<float, 1> d1;
  for (; i < intermediate; ++i) {
    hn::StoreU(SiluMul(d1, hn::LoadU(d1, gate_up + i), hn::LoadU(d1, up + i)), d1, out + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashquant {

HWY_EXPORT(SiluAndMulRow);

void SiluAndMulCpu(const SiluAndMulParams& params, ThreadPool& pool) {
  const int64_t intermediate = params.intermediate;
  ForRows(pool, params.num_rows, 2 * intermediate, [&](int64_t row) {
    HWY_DYNAMIC_DISPATCH(SiluAndMulRow)
    (static_cast<const float*>(params.gate_up) + row * 2 * intermediate, intermediate,
     static_cast<float*>(params.out) + row * intermediate);
  });
}

}  // namespace flashquant
#endif  // HWY_ONCE
