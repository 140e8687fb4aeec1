// Random quantized layers for the GPU tests and benchmarks of the fused linear kernel: canonical
// INT4 arrays and Tile-COO arrays as the format documents describe them, plus the exact dense
// matrix they stand for. Stand-alone: needs neither the engine nor Abseil.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/linear_w4a16/pack.h"

namespace flashquant::bench {

enum class OutlierLayout {
  kFullRecords,    // records of four slots of a random column, everywhere
  kRaggedRecords,  // one to four slots a record, the others null
  kEmptyTiles,     // all outliers in every third tile
  kHotColumn,      // one output feature is all outliers
  kHotTile,        // one tile is half outliers: more than a stage holds
};

struct ProblemSpec {
  int k = 0;
  int n = 0;
  int group_size = 128;  // -1: one group per output feature
  bool zero_points = false;
  double density = 0.0;  // stored slots / (k * n)
  OutlierLayout layout = OutlierLayout::kFullRecords;
  int tile_k = 256;
  int tile_n = 128;
  uint64_t seed = 1;

  std::string Name() const;
};

struct Problem {
  ProblemSpec spec;
  std::vector<uint8_t> qweight;
  std::vector<uint16_t> scales;
  std::vector<uint8_t> zeros;
  std::vector<uint32_t> tile_indptr;
  std::vector<uint8_t> records;
  int64_t n_padded = 0;
  int64_t k_padded = 0;
  int64_t group_size = 0;

  cuda::Int4Arrays weight() const;
  cuda::TileCooPointers outliers() const;
  int64_t num_slots() const { return static_cast<int64_t>(records.size()) / 4; }
  // W[n][k] = dequantized code + outlier, in double, from the arrays above.
  std::vector<double> DenseMatrix() const;
};

// Deterministic in `spec`. Codes at outliers equal the zero point ("replace").
Problem MakeProblem(const ProblemSpec& spec, int num_threads);

uint16_t ToBf16(float value);
float FromBf16(uint16_t bits);

// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int Below(int limit) {
    return static_cast<int>((Next() >> 32) * static_cast<uint64_t>(limit) >> 32);
  }
  float Uniform() { return static_cast<float>(Next() >> 40) * 0x1.0p-24f; }
  float Normal();  // approximately: a sum of uniform numbers

 private:
  uint64_t state_;
};

}  // namespace flashquant::bench
