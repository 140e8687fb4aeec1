// The linear op over BF16, F32 and I8 segments. The kernels are linear_tile-inl.h.
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/linear_dense.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "hwy/highway.h"
#include "kernels/cpu/linear_run-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {

void DenseTask(const LinearTask& task) {
  switch (task.segment->kind) {
    case PackedKind::kBFloat16:
      return RunTask<PackedKind::kBFloat16>(task);
    case PackedKind::kInt8:
      return RunTask<PackedKind::kInt8>(task);
    default:
      return RunTask<PackedKind::kFloat32>(task);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashquant {

HWY_EXPORT(DenseTask);

void RunDenseTask(const LinearTask& task) { HWY_DYNAMIC_DISPATCH(DenseTask)(task); }

}  // namespace flashquant
#endif  // HWY_ONCE
