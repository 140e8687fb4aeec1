#include "engine/quantize/random_layer.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>

#include "kernels/base/check.h"
#include "kernels/format/tile_coo_encoder.h"

namespace flashquant {
namespace {

// Streams of one layer.
enum Stream : uint64_t { kCodeStream = 1, kScaleStream, kZeroStream, kOutlierStream };

constexpr uint64_t StreamSeed(uint64_t seed, uint64_t stream, int64_t row) {
  return RandomWord(RandomWord(seed, stream), static_cast<uint64_t>(row));
}

// Of codes that are spread evenly over 0..15.
constexpr float kCodeDeviation = 4.61f;
// Outliers are what stands out.
constexpr float kOutlierFactor = 3.0f;

float WeightDeviation(int64_t k) { return 1.0f / std::sqrt(static_cast<float>(k)); }

double Uniform(uint64_t random) {
  return (static_cast<double>(random >> 11) + 0.5) * 0x1p-53;  // never 0 or 1
}

// Positions of a tile that are taken, and how many a column has.
struct TileMask {
  std::array<std::bitset<256>, 256> taken;
  std::array<int32_t, 256> records{};
};

}  // namespace

NormalTable::NormalTable(float deviation) {
  for (size_t i = 0; i < values_.size(); ++i) {
    const double radius = std::sqrt(-2.0 * std::log(Uniform(RandomWord(1, 2 * i))));
    const double angle = 2.0 * std::numbers::pi * Uniform(RandomWord(1, 2 * i + 1));
    values_[i] = ToBFloat16(deviation * static_cast<float>(radius * std::cos(angle)));
    if ((values_[i].bits & 0x7fffu) == 0) values_[i] = ToBFloat16(deviation);
  }
}

void FillNormal(const NormalTable& table, uint64_t seed, int64_t first, int64_t count,
                BFloat16* out) {
  for (int64_t i = 0; i < count;) {
    const int64_t index = first + i;
    uint64_t word = RandomWord(seed, static_cast<uint64_t>(index / 4)) >> (16 * (index % 4));
    for (int64_t j = index % 4; j < 4 && i < count; ++j, ++i, word >>= 16) out[i] = table.At(word);
  }
}

RandomInt4Layer::RandomInt4Layer(const Options& options)
    : options_(options), outlier_values_(kOutlierFactor * WeightDeviation(options.k)) {
  geometry_.k = options.k;
  geometry_.n = options.n;
  geometry_.semantics = TileCooSemantics::kResidual;
  if (options.density <= 0) return;
  const int64_t tiles_k = geometry_.num_tiles_k();
  double wanted = 0;
  int64_t total = 0;
  for (int64_t tile = 0; tile < geometry_.num_tiles(); ++tile) {
    const int64_t rows =
        std::min<int64_t>(geometry_.tile_k, options.k - tile % tiles_k * geometry_.tile_k);
    const int64_t columns =
        std::min<int64_t>(geometry_.tile_n, options.n - tile / tiles_k * geometry_.tile_n);
    wanted += options.density * static_cast<double>(rows * columns) / kSlotsPerRecord;
    const int64_t most = columns * (rows / kSlotsPerRecord) / 2;
    total += std::clamp<int64_t>(static_cast<int64_t>(wanted) - total, 0, most);
    tile_indptr_.push_back(static_cast<uint32_t>(total));
  }
  if (total == 0) tile_indptr_ = {0};
}

uint8_t RandomInt4Layer::ZeroPoint(int64_t row, int64_t group) const {
  if (options_.symmetric) return 8;
  const uint64_t seed = StreamSeed(options_.seed, kZeroStream, row);
  return static_cast<uint8_t>(6 + RandomWord(seed, static_cast<uint64_t>(group)) % 4);
}

void RandomInt4Layer::FillCodes(int64_t row, uint8_t* out) const {
  const int64_t num_bytes = options_.k_padded / 2;
  const uint64_t seed = StreamSeed(options_.seed, kCodeStream, row);
  for (int64_t i = 0; i < num_bytes; i += 8) {
    const uint64_t word = RandomWord(seed, static_cast<uint64_t>(i / 8));
    std::memcpy(out + i, &word, static_cast<size_t>(std::min<int64_t>(8, num_bytes - i)));
  }
  // Padding stands for 0.
  for (int64_t k = row < options_.n ? options_.k : 0; k < options_.k_padded; ++k) {
    const uint8_t zero = ZeroPoint(row, k / options_.group_size);
    uint8_t& byte = out[k / 2];
    byte = static_cast<uint8_t>(k % 2 == 0 ? (byte & 0xf0) | zero : (byte & 0x0f) | zero << 4);
  }
}

void RandomInt4Layer::FillScales(int64_t row, BFloat16* out) const {
  const uint64_t seed = StreamSeed(options_.seed, kScaleStream, row);
  const float mean = WeightDeviation(options_.k) / kCodeDeviation;
  for (int64_t group = 0; group < groups_per_row(); ++group) {
    const auto spread = static_cast<float>(Uniform(RandomWord(seed, static_cast<uint64_t>(group))));
    out[group] = row < options_.n ? ToBFloat16(mean * (0.75f + 0.5f * spread)) : BFloat16{};
  }
}

void RandomInt4Layer::FillZeros(int64_t row, uint8_t* out) const {
  for (int64_t group = 0; group < groups_per_row(); ++group) out[group] = ZeroPoint(row, group);
}

void RandomInt4Layer::MakeTile(int64_t tile, std::vector<TileCooBucket>& buckets,
                               std::vector<TileCooRecord>& records) const {
  const int64_t tiles_k = geometry_.num_tiles_k();
  const auto rows = static_cast<uint64_t>(
      std::min<int64_t>(geometry_.tile_k, geometry_.k - tile % tiles_k * geometry_.tile_k));
  const auto columns = static_cast<uint64_t>(
      std::min<int64_t>(geometry_.tile_n, geometry_.n - tile / tiles_k * geometry_.tile_n));
  const uint64_t seed = StreamSeed(options_.seed, kOutlierStream, tile);
  const auto t = static_cast<size_t>(tile);
  const uint32_t num_records = tile_indptr_[t + 1] - tile_indptr_[t];

  auto mask = std::make_unique<TileMask>();
  std::vector<TileCooTileSlot> slots;
  uint64_t word = 0;
  for (uint32_t record = 0; record < num_records; ++record) {
    uint64_t column = RandomWord(seed, word++) % columns;
    const auto is_full = [&] {
      return mask->records[column] >= static_cast<int32_t>(rows / kSlotsPerRecord);
    };
    while (is_full()) column = (column + 1) % columns;
    ++mask->records[column];
    for (int slot = 0; slot < kSlotsPerRecord; ++slot) {
      const uint64_t random = RandomWord(seed, word++);
      uint64_t row = random % rows;
      while (mask->taken[column][row]) row = (row + 1) % rows;
      mask->taken[column][row] = true;
      slots.push_back({.row = static_cast<uint8_t>(row),
                       .column = static_cast<uint8_t>(column),
                       .value_bits = outlier_values_.At(random >> 32).bits});
    }
  }
  auto encoder = TileCooTileEncoder::Create(geometry_);
  FQ_CHECK(encoder.ok() && encoder->Encode(slots, buckets, records).ok());
}

}  // namespace flashquant
