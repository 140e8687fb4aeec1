#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/machine_peaks.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include <atomic>
#include <cstdlib>
#include <ctime>
#include <string_view>

#include "hwy/highway.h"
#include "tests/bench/machine_peaks.h"

HWY_BEFORE_NAMESPACE();
namespace flashquant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Reads four streams side by side, which is faster here than one. The result keeps the loads alive.
uint32_t ReadAll(const uint32_t* data, int64_t count) {
  const hn::ScalableTag<uint32_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t part = count / 4;
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  auto sum2 = hn::Zero(d);
  auto sum3 = hn::Zero(d);
  for (int64_t i = 0; i + lanes <= part; i += lanes) {
    const uint32_t* from = data + i;
    sum0 = hn::Add(sum0, hn::LoadU(d, from));
    sum1 = hn::Add(sum1, hn::LoadU(d, from + part));
    sum2 = hn::Add(sum2, hn::LoadU(d, from + 2 * part));
    sum3 = hn::Add(sum3, hn::LoadU(d, from + 3 * part));
  }
  return hn::GetLane(hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3)));
}

// Ten chains of `count` FMAs; returns the operations done.
double FmaChains(int64_t count, float* sink) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, 0.999f);
  const auto addend = hn::Set(d, 0.001f);
  // Different starts, or the compiler would see that all chains are one.
  auto s0 = hn::Set(d, 0.01f);
  auto s1 = hn::Set(d, 0.02f);
  auto s2 = hn::Set(d, 0.03f);
  auto s3 = hn::Set(d, 0.04f);
  auto s4 = hn::Set(d, 0.05f);
  auto s5 = hn::Set(d, 0.06f);
  auto s6 = hn::Set(d, 0.07f);
  auto s7 = hn::Set(d, 0.08f);
  auto s8 = hn::Set(d, 0.09f);
  auto s9 = hn::Set(d, 0.10f);
  for (int64_t i = 0; i < count; ++i) {
    s0 = hn::MulAdd(s0, factor, addend);
    s1 = hn::MulAdd(s1, factor, addend);
    s2 = hn::MulAdd(s2, factor, addend);
    s3 = hn::MulAdd(s3, factor, addend);
    s4 = hn::MulAdd(s4, factor, addend);
    s5 = hn::MulAdd(s5, factor, addend);
    s6 = hn::MulAdd(s6, factor, addend);
    s7 = hn::MulAdd(s7, factor, addend);
    s8 = hn::MulAdd(s8, factor, addend);
    s9 = hn::MulAdd(s9, factor, addend);
  }
  auto sum = hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), hn::Add(s4, s5));
  sum = hn::Add(sum, hn::Add(hn::Add(s6, s7), hn::Add(s8, s9)));
  *sink = hn::GetLane(sum);
  return 20.0 * static_cast<double>(count) * static_cast<double>(hn::Lanes(d));
}

}  // namespace HWY_NAMESPACE
}  // namespace flashquant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashquant {
namespace {

HWY_EXPORT(ReadAll);
HWY_EXPORT(FmaChains);

}  // namespace

double BenchSeconds(int32_t num_threads) {
  static const bool cpu_clock = [] {
    const char* clock = std::getenv("FQ_BENCH_CLOCK");
    return clock != nullptr && std::string_view(clock) == "cpu";
  }();
  timespec now{};
  clock_gettime(cpu_clock ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  const double seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  return cpu_clock ? seconds / num_threads : seconds;
}

double StreamReadSeconds(const void* data, int64_t num_bytes, ThreadPool& pool) {
  constexpr int64_t kPartBytes = int64_t{1} << 21;
  const int64_t parts = num_bytes / kPartBytes;
  std::atomic<uint32_t> sink{0};
  const double start = BenchSeconds(pool.num_threads());
  pool.ParallelFor(parts, [&](int64_t part, int32_t /*thread*/) {
    const auto* from = static_cast<const uint32_t*>(data) + part * (kPartBytes / 4);
    sink += HWY_DYNAMIC_DISPATCH(ReadAll)(from, kPartBytes / 4);
  });
  return (BenchSeconds(pool.num_threads()) - start) * static_cast<double>(num_bytes) /
         static_cast<double>(parts * kPartBytes);
}

double FmaPeakFlops(double seconds, ThreadPool& pool) {
  constexpr int64_t kFmasPerTask = 200000;
  std::atomic<double> operations{0.0};
  const double start = BenchSeconds(pool.num_threads());
  while ((BenchSeconds(pool.num_threads()) - start) < seconds) {
    pool.ParallelFor(pool.num_threads() * 4, [&](int64_t /*task*/, int32_t /*thread*/) {
      float sink = 0.0f;
      const double done = HWY_DYNAMIC_DISPATCH(FmaChains)(kFmasPerTask, &sink);
      operations.fetch_add(sink == 12345.0f ? 0.0 : done);
    });
  }
  return operations.load() / (BenchSeconds(pool.num_threads()) - start);
}

}  // namespace flashquant
#endif  // HWY_ONCE
