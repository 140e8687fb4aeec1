// The linear op on weights far larger than the last-level cache: GB/s and GFLOP/s, and their shares
// of what the machine can do. The yardsticks are measured between the op's own runs, with the same
// threads, so that other load on the machine hits both; medians are reported.
//
//   linear_bench [--benchmark_filter=...]
// Environment: FQ_BENCH_THREADS, default all cores; FQ_BENCH_CLOCK=cpu, see machine_peaks.h.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/base/check.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/bench/machine_peaks.h"
#include "tests/support/random_weights.h"

namespace flashquant {
namespace {

constexpr int64_t kOutputs = 14336;
constexpr int64_t kInputs = 4096;
constexpr int kLayers =
    8;  // 240 MB and more: nothing is left in the cache from one round to the next

int32_t NumThreads() {
  const char* text = std::getenv("FQ_BENCH_THREADS");
  return text != nullptr ? std::max(1, std::atoi(text)) : UsableCores();
}

ThreadPool& Pool() {
  static ThreadPool pool(NumThreads());
  return pool;
}

struct Case {
  bool int4 = true;
  int64_t group_size = 128;
  double density = 0.0;
};

// Layers of one case, made once; another case replaces them.
const std::vector<std::unique_ptr<PackedLinear>>& Layers(const Case& wanted) {
  static std::vector<std::unique_ptr<PackedLinear>> layers;
  static Case made;
  if (!layers.empty() && made.int4 == wanted.int4 && made.group_size == wanted.group_size &&
      made.density == wanted.density) {
    return layers;
  }
  layers.clear();
  made = wanted;
  RandomLinearOptions options;
  options.n = kOutputs;
  options.k = kInputs;
  options.int4 = wanted.int4;
  options.dense_dtype = DType::kBF16;
  options.group_size = wanted.group_size;
  options.density = wanted.density;
  const RandomLinear source(options);
  const LinearPart part = source.part();
  for (int i = 0; i < (wanted.int4 ? kLayers : kLayers / 2); ++i) {
    auto layer = MakePackedLinear({&part, 1});
    FQ_CHECK(layer.ok());
    layers.push_back(*std::move(layer));
  }
  return layers;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void RunLinearBench(benchmark::State& state, const Case& which) {
  const auto& layers = Layers(which);
  const int64_t num_rows = state.range(0);
  const std::vector<float> x = RandomFloats(num_rows * kInputs, 1.0f, 1);
  std::vector<float> y(static_cast<size_t>(num_rows * kOutputs));
  double bytes = 0.0;
  for (const auto& layer : layers) bytes += static_cast<double>(layer->num_bytes());
  const double flops = 2.0 * static_cast<double>(num_rows * kOutputs * kInputs * kLayers) *
                       static_cast<double>(layers.size()) / kLayers;
  LinearScratch scratch;
  std::vector<double> op_seconds;
  std::vector<double> read_rates;
  std::vector<double> fma_rates;
  for (auto _ : state) {
    double read = 0.0;
    for (const auto& layer : layers) {
      const HostMemory& words = layer->segments()[0].words;
      read += StreamReadSeconds(words.As<void>(), words.num_bytes(), Pool()) /
              static_cast<double>(words.num_bytes());
    }
    read_rates.push_back(static_cast<double>(layers.size()) / read);
    fma_rates.push_back(FmaPeakFlops(0.02, Pool()));
    const double start = BenchSeconds(Pool().num_threads());
    for (const auto& layer : layers) {
      LinearParams params;
      params.num_rows = static_cast<int32_t>(num_rows);
      params.weight = layer.get();
      params.x = x.data();
      params.y = y.data();
      FQ_CHECK(LinearCpu(params, Pool(), scratch).ok());
    }
    op_seconds.push_back(BenchSeconds(Pool().num_threads()) - start);
    state.SetIterationTime(op_seconds.back());
  }
  const double seconds = Median(op_seconds);
  state.counters["MB"] = bytes / 1e6;
  state.counters["GB/s"] = bytes / seconds / 1e9;
  state.counters["read_GB/s"] = Median(read_rates) / 1e9;
  state.counters["of_read_%"] = 100.0 * bytes / seconds / Median(read_rates);
  state.counters["GFLOP/s"] = flops / seconds / 1e9;
  state.counters["peak_GFLOP/s"] = Median(fma_rates) / 1e9;
  state.counters["of_peak_%"] = 100.0 * flops / seconds / Median(fma_rates);
}

void BM_Int4Group128(benchmark::State& state) { RunLinearBench(state, {true, 128, 0.0}); }
void BM_Int4Group128Outliers1Percent(benchmark::State& state) {
  RunLinearBench(state, {true, 128, 0.01});
}
void BM_Int4Group32(benchmark::State& state) { RunLinearBench(state, {true, 32, 0.0}); }
void BM_BFloat16(benchmark::State& state) { RunLinearBench(state, {false, 0, 0.0}); }

void Rows(benchmark::internal::Benchmark* bench) {
  bench->Arg(1)->Arg(2)->Arg(4)->Arg(8)->Arg(32)->UseManualTime()->Iterations(15)->Unit(
      benchmark::kMillisecond);
}
BENCHMARK(BM_Int4Group128)->Apply(Rows);
BENCHMARK(BM_Int4Group128Outliers1Percent)->Apply(Rows);
BENCHMARK(BM_Int4Group32)->Apply(Rows);
BENCHMARK(BM_BFloat16)->Apply(Rows);

}  // namespace
}  // namespace flashquant

BENCHMARK_MAIN();
