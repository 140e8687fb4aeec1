// Paged attention of decode and prefill steps over shuffled blocks, at the head shape of Llama-3-8B
// (32 query heads, 8 KV heads of 128) and each type of cache: cached bytes read a second, and
// operations a second.
//
// Environment: FQ_BENCH_THREADS and FQ_BENCH_CLOCK as linear_bench.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/check.h"
#include "kernels/base/float8.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/bench/machine_peaks.h"
#include "tests/support/random_weights.h"

namespace flashquant {
namespace {

constexpr int32_t kHeads = 32;
constexpr int32_t kKvHeads = 8;
constexpr int32_t kHeadDim = 128;
constexpr int32_t kBlockTokens = 16;

ThreadPool& Pool() {
  static ThreadPool pool([] {
    const char* text = std::getenv("FQ_BENCH_THREADS");
    return text != nullptr ? std::max(1, std::atoi(text)) : UsableCores();
  }());
  return pool;
}

// Arguments: sequences, context of each, query rows of each, bytes of a cache element.
void BM_PagedAttention(benchmark::State& state) {
  const auto sequences = static_cast<int32_t>(state.range(0));
  const auto context = static_cast<int32_t>(state.range(1));
  const auto rows = static_cast<int32_t>(state.range(2));
  const DType kv_dtype = state.range(3) == 4   ? DType::kF32
                         : state.range(3) == 2 ? DType::kBF16
                                               : DType::kF8E4M3;
  const int32_t blocks = CeilDiv(context, kBlockTokens);
  const PagedKvGeometry kv = {1, sequences * blocks + 1, kBlockTokens, kKvHeads, kHeadDim};
  const std::vector<float> values = RandomFloats(kv.BlockElements() * kv.num_blocks, 1.0f, 1);
  const auto num_bytes = static_cast<int64_t>(values.size()) * DTypeBytes(kv_dtype);
  auto k_cache = HostMemory::Create(num_bytes);
  auto v_cache = HostMemory::Create(num_bytes);
  FQ_CHECK(k_cache.ok() && v_cache.ok());
  for (HostMemory* cache : {&*k_cache, &*v_cache}) {
    if (kv_dtype == DType::kF32) {
      std::copy(values.begin(), values.end(), cache->As<float>());
    } else if (kv_dtype == DType::kBF16) {
      std::transform(values.begin(), values.end(), cache->As<BFloat16>(), ToBFloat16);
    } else {
      std::transform(values.begin(), values.end(), cache->As<Float8E4M3>(), ToFloat8E4M3);
    }
  }
  const std::vector<float> qkv =
      RandomFloats(int64_t{sequences} * rows * (kHeads + 2 * kKvHeads) * kHeadDim, 1.0f, 2);
  std::vector<int32_t> block_ids(static_cast<size_t>(sequences * blocks));
  std::iota(block_ids.begin(), block_ids.end(), 1);
  std::shuffle(block_ids.begin(), block_ids.end(), std::mt19937(3));
  std::vector<int32_t> query_indptr;
  std::vector<int32_t> block_indptr;
  for (int32_t s = 0; s <= sequences; ++s) {
    query_indptr.push_back(s * rows);
    block_indptr.push_back(s * blocks);
  }
  const std::vector<int32_t> contexts(static_cast<size_t>(sequences), context);
  std::vector<float> out(static_cast<size_t>(sequences * rows * kHeads * kHeadDim));

  PagedAttentionParams params;
  params.batch = {sequences,       sequences * rows,    query_indptr.data(),
                  contexts.data(), block_indptr.data(), block_ids.data()};
  params.num_heads = kHeads;
  params.num_kv_heads = kKvHeads;
  params.head_dim = kHeadDim;
  params.softmax_scale = 0.088f;
  params.qkv = qkv.data();
  params.kv = kv;
  params.k_cache = k_cache->As<float>();
  params.v_cache = v_cache->As<float>();
  params.out = out.data();
  std::vector<float> scratch(
      static_cast<size_t>(Pool().num_threads() * AttentionScratchFloats(params, kv_dtype)));
  for (auto _ : state) {
    const double start = BenchSeconds(Pool().num_threads());
    PagedAttentionCpu(params, kv_dtype, Pool(), scratch.data());
    state.SetIterationTime(BenchSeconds(Pool().num_threads()) - start);
  }
  // Row j of a sequence sees context - rows + j + 1 keys.
  const double keys = static_cast<double>(sequences) * rows * (context - (rows - 1) / 2.0);
  const double kv_bytes =
      2.0 * static_cast<double>(DTypeBytes(kv_dtype)) * sequences * context * kKvHeads * kHeadDim;
  state.counters["KV_GB/s"] =
      benchmark::Counter(kv_bytes / 1e9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["GFLOP/s"] = benchmark::Counter(4.0 * keys * kHeads * kHeadDim / 1e9,
                                                 benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_PagedAttention)
    ->Args({1, 64, 1, 4})
    ->Args({1, 256, 1, 4})
    ->Args({1, 1024, 1, 4})
    ->Args({8, 1024, 1, 4})
    ->Args({1, 8192, 1, 4})
    ->Args({1, 512, 512, 4})
    ->Args({8, 1024, 1, 2})
    ->Args({8, 1024, 1, 1})
    ->Args({1, 8192, 1, 2})
    ->Args({1, 8192, 1, 1})
    ->Args({1, 512, 512, 1})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace flashquant

BENCHMARK_MAIN();
