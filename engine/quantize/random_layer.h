// Random bytes of tensors, made from a seed whenever they are asked for: any rows of a tensor, in
// any order and from any thread, are the same bytes.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/base/bfloat16.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {

// A stream of 64-bit words of (seed, index). Source: the output function of SplitMix64 (Steele,
// Lea, Flood, "Fast splittable pseudorandom number generators").
constexpr uint64_t RandomWord(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// A few thousand values of a normal distribution around 0, none of them 0.
class NormalTable final {
 public:
  explicit NormalTable(float deviation);
  BFloat16 At(uint64_t random) const { return values_[random % values_.size()]; }

 private:
  std::array<BFloat16, 4096> values_;
};

// `count` BF16 values of `table`, from `first` on in the stream of `seed`.
void FillNormal(const NormalTable& table, uint64_t seed, int64_t first, int64_t count,
                BFloat16* out);

// An INT4 layer with outliers that are added to its codes ("residual" semantics), so that neither
// depends on the other.
class RandomInt4Layer final {
 public:
  struct Options {
    int64_t n = 0;
    int64_t k = 0;
    int64_t n_padded = 0;
    int64_t k_padded = 0;
    int64_t group_size = 0;  // k_padded for one group per row
    bool symmetric = false;
    double density = 0;  // stored slots / (n * k)
    uint64_t seed = 0;
  };
  explicit RandomInt4Layer(const Options& options);

  const Options& options() const { return options_; }
  const TileCooGeometry& geometry() const { return geometry_; }
  int64_t groups_per_row() const { return options_.k_padded / options_.group_size; }
  // Prefix sums of the tiles' records; one 0 alone: the layer has no outliers.
  const std::vector<uint32_t>& tile_indptr() const { return tile_indptr_; }

  // Rows of the three dense tensors; `out` has a row's bytes.
  void FillCodes(int64_t row, uint8_t* out) const;
  void FillScales(int64_t row, BFloat16* out) const;
  void FillZeros(int64_t row, uint8_t* out) const;
  // Buckets and records of one tile, in the format's canonical order.
  void MakeTile(int64_t tile, std::vector<TileCooBucket>& buckets,
                std::vector<TileCooRecord>& records) const;

 private:
  uint8_t ZeroPoint(int64_t row, int64_t group) const;

  const Options options_;
  const NormalTable outlier_values_;
  TileCooGeometry geometry_;
  std::vector<uint32_t> tile_indptr_ = {0};
};

}  // namespace flashquant
