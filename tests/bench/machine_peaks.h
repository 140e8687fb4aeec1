// What the machine itself can do, as the yardstick of op benchmarks: how fast memory is read and
// how many FP32 multiply-adds run a second, with the same SIMD target and threads as the ops.
#pragma once

#include <cstdint>

#include "kernels/cpu/thread_pool.h"

namespace flashquant {

// Seconds of a steady clock. With FQ_BENCH_CLOCK=cpu, the process's CPU seconds divided by
// `num_threads` instead: for a machine that others are using, where wall time says little.
double BenchSeconds(int32_t num_threads);

// Seconds to read num_bytes at `data` once, in order, each thread its own part.
double StreamReadSeconds(const void* data, int64_t num_bytes, ThreadPool& pool);

// FP32 operations per second of independent FMA chains in registers (an FMA is two), over about
// `seconds`.
double FmaPeakFlops(double seconds, ThreadPool& pool);

}  // namespace flashquant
