// Encoding the outliers of one matrix to Tile-COO: seconds of EncodeTileCoo, one thread, for the
// largest layer of Llama-3-8B (the paper's encoder takes 100 s).
//
//   encode_bench [--benchmark_filter=...]
// Each weight is an outlier with the density's probability; they are given in rows, as the
// quantizer gives them.
#include <cstdint>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/check.h"
#include "kernels/format/tile_coo_encoder.h"

namespace flashquant {
namespace {

constexpr int64_t kOutputs = 14336;
constexpr int64_t kInputs = 4096;

// Rows in order; each weight is drawn with probability in_thousand / 1000.
std::vector<TileCooSlot> RandomSlots(int64_t in_thousand) {
  std::mt19937 random(1);
  std::vector<TileCooSlot> slots;
  for (int32_t n = 0; n < kOutputs; ++n) {
    for (int32_t k = 0; k < kInputs; ++k) {
      if (random() % 1000 >= static_cast<uint32_t>(in_thousand)) continue;
      const float value = 1.0f + static_cast<float>(random() % 256);
      slots.push_back({.k = k, .n = n, .value_bits = ToBFloat16(value).bits});
    }
  }
  return slots;
}

void BM_Encode(benchmark::State& state) {
  const std::vector<TileCooSlot> slots = RandomSlots(state.range(0));
  TileCooGeometry geometry;
  geometry.k = kInputs;
  geometry.n = kOutputs;
  int64_t records = 0;
  for (auto _ : state) {
    const auto encoded = EncodeTileCoo(geometry, slots);
    FQ_CHECK(encoded.ok());
    records = static_cast<int64_t>(encoded->arrays.records.size());
  }
  state.counters["outliers"] = static_cast<double>(slots.size());
  state.counters["records"] = static_cast<double>(records);
}
BENCHMARK(BM_Encode)->Arg(10)->Arg(30)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace flashquant

BENCHMARK_MAIN();
