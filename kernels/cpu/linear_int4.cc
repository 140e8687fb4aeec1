// The linear op over INT4 segments, fused with their outliers. The kernels are linear_tile-inl.h
// and, on AVX-512 with VNNI, digit_tile-inl.h.
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/linear_int4.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "hwy/highway.h"
#include "kernels/cpu/linear_run-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {

void Int4Task(const LinearTask& task) { RunTask<PackedKind::kInt4>(task); }

bool Int4Digits() { return kInt4TakesDigits; }
void Int4RowDigits(const DigitRow& row) { RowDigits(row); }

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashquant {

HWY_EXPORT(Int4Task);
HWY_EXPORT(Int4Digits);
HWY_EXPORT(Int4RowDigits);

void RunInt4Task(const LinearTask& task) { HWY_DYNAMIC_DISPATCH(Int4Task)(task); }
bool TakesDigits() { return HWY_DYNAMIC_DISPATCH(Int4Digits)(); }
void MakeRowDigits(const DigitRow& row) { HWY_DYNAMIC_DISPATCH(Int4RowDigits)(row); }

}  // namespace flashquant
#endif  // HWY_ONCE
