// The linear op over INT4 segments, fused with their outliers. The kernel is linear_tile-inl.h.
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/linear_int4.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "hwy/highway.h"
#include "kernels/cpu/linear_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {

void Int4Task(const LinearTask& task) { RunTask<PackedKind::kInt4>(task); }

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashquant {

HWY_EXPORT(Int4Task);

void RunInt4Task(const LinearTask& task) { HWY_DYNAMIC_DISPATCH(Int4Task)(task); }

}  // namespace flashquant
#endif  // HWY_ONCE
