// See linear_problem.h.
#include "kernels/bench/linear_problem.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

namespace flashquant::bench {
namespace {

void ParallelFor(int64_t count, int num_threads, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(num_threads));
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&] {
      for (int64_t item = next++; item < count; item = next++) body(item);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Tile {
  int64_t k0 = 0;
  int64_t n0 = 0;
  int rows = 0;
  int columns = 0;
};

// Appends a record: `rows` (1 to 4, the rest null) of one column.
void AppendRecord(const std::vector<int>& rows, int column, Random& random,
                  std::vector<uint8_t>& out) {
  uint8_t record[16] = {};
  for (size_t s = 0; s < 4; ++s) {
    record[s] = static_cast<uint8_t>(s < rows.size() ? rows[s] : rows[0]);
    record[4 + s] = static_cast<uint8_t>(column);
    uint16_t value = 0;
    if (s < rows.size()) {
      value = ToBf16((random.Uniform() + 0.5f) * (random.Below(2) == 0 ? 0.3f : -0.3f));
    }
    std::memcpy(record + 8 + 2 * s, &value, 2);
  }
  out.insert(out.end(), record, record + 16);
}

// `num_records` records of random columns and rows, none twice.
void FillTile(const Tile& tile, int64_t num_records, bool ragged, Random& random,
              std::vector<uint8_t>& out) {
  std::vector<bool> used(static_cast<size_t>(tile.rows) * static_cast<size_t>(tile.columns));
  const int64_t limit = static_cast<int64_t>(used.size()) * 3 / 4 / 4;
  for (int64_t r = 0; r < std::min(num_records, limit); ++r) {
    const int column = random.Below(tile.columns);
    const int wanted = ragged ? 1 + random.Below(4) : 4;
    std::vector<int> rows;
    for (int attempt = 0; attempt < 64 && static_cast<int>(rows.size()) < wanted; ++attempt) {
      const int row = random.Below(tile.rows);
      const auto index =
          static_cast<size_t>(column) * static_cast<size_t>(tile.rows) + static_cast<size_t>(row);
      if (used[index]) continue;
      used[index] = true;
      rows.push_back(row);
    }
    if (!rows.empty()) AppendRecord(rows, column, random, out);
  }
}

void FillHotColumn(const Tile& tile, int column, Random& random, std::vector<uint8_t>& out) {
  for (int row = 0; row < tile.rows; row += 4) {
    std::vector<int> rows;
    for (int i = row; i < std::min(row + 4, tile.rows); ++i) rows.push_back(i);
    AppendRecord(rows, column, random, out);
  }
}

std::vector<uint8_t> MakeTile(const ProblemSpec& spec, const Tile& tile, int64_t index,
                              Random& random) {
  std::vector<uint8_t> out;
  const double records = spec.density * tile.rows * tile.columns / 4;
  auto whole = static_cast<int64_t>(records);
  if (random.Uniform() < records - static_cast<double>(whole)) ++whole;
  switch (spec.layout) {
    case OutlierLayout::kFullRecords:
      FillTile(tile, whole, false, random, out);
      break;
    case OutlierLayout::kRaggedRecords:
      FillTile(tile, whole, true, random, out);
      break;
    case OutlierLayout::kEmptyTiles:
      if (index % 3 == 1) FillTile(tile, 3 * whole + 1, false, random, out);
      break;
    case OutlierLayout::kHotColumn:
      if (tile.n0 == 0) FillHotColumn(tile, std::min(5, tile.columns - 1), random, out);
      break;
    case OutlierLayout::kHotTile:
      FillTile(tile, index == 0 ? int64_t{tile.rows} * tile.columns / 8 : whole, false, random,
               out);
      break;
  }
  return out;
}

void MakeWeight(Problem& problem, int num_threads) {
  const ProblemSpec& spec = problem.spec;
  auto round_up = [](int64_t v, int64_t m) { return (v + m - 1) / m * m; };
  problem.n_padded = round_up(spec.n, 8);
  problem.k_padded = round_up(spec.k, spec.group_size < 0 ? 2 : spec.group_size);
  problem.group_size = spec.group_size < 0 ? problem.k_padded : spec.group_size;
  const int64_t groups = problem.k_padded / problem.group_size;
  problem.qweight.resize(static_cast<size_t>(problem.n_padded * problem.k_padded / 2));
  problem.scales.resize(static_cast<size_t>(problem.n_padded * groups));
  if (spec.zero_points) problem.zeros.resize(problem.scales.size());
  ParallelFor(problem.n_padded, num_threads, [&](int64_t n) {
    Random random(spec.seed * 1000003 + static_cast<uint64_t>(n));
    for (int64_t g = 0; g < groups; ++g) {
      const auto i = static_cast<size_t>(n * groups + g);
      problem.scales[i] = n < spec.n ? ToBf16((random.Uniform() + 0.5f) * 0.01f) : uint16_t{0};
      if (spec.zero_points) problem.zeros[i] = static_cast<uint8_t>(random.Below(16));
    }
    uint8_t* row = problem.qweight.data() + n * problem.k_padded / 2;
    for (int64_t b = 0; b < problem.k_padded / 2; b += 8) {
      const uint64_t bits = random.Next();
      std::memcpy(row + b, &bits,
                  static_cast<size_t>(std::min<int64_t>(8, problem.k_padded / 2 - b)));
    }
  });
}

}  // namespace

float Random::Normal() {
  float sum = -4.0f;
  for (int i = 0; i < 8; ++i) sum += Uniform();
  return sum * 1.2247449f;  // variance of the sum is 8 / 12
}

uint16_t ToBf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float FromBf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value = 0.0f;
  std::memcpy(&value, &word, 4);
  return value;
}

std::string ProblemSpec::Name() const {
  static const char* const kLayouts[] = {"full", "ragged", "empty-tiles", "hot-column", "hot-tile"};
  char text[128];
  std::snprintf(text, sizeof(text), "%dx%d g%d %s %.1f%% %s", k, n, group_size,
                zero_points ? "asym" : "sym", density * 100, kLayouts[static_cast<int>(layout)]);
  return text;
}

cuda::Int4Arrays Problem::weight() const {
  return {spec.n,     spec.k,         n_padded,      k_padded,
          group_size, qweight.data(), scales.data(), zeros.empty() ? nullptr : zeros.data()};
}

cuda::TileCooPointers Problem::outliers() const {
  return {spec.tile_k, spec.tile_n, records.empty() ? nullptr : tile_indptr.data(), records.data()};
}

Problem MakeProblem(const ProblemSpec& spec, int num_threads) {
  Problem problem;
  problem.spec = spec;
  MakeWeight(problem, num_threads);
  const int64_t tiles_k = (spec.k + spec.tile_k - 1) / spec.tile_k;
  const int64_t tiles_n = (spec.n + spec.tile_n - 1) / spec.tile_n;
  std::vector<std::vector<uint8_t>> tiles(static_cast<size_t>(tiles_k * tiles_n));
  auto tile_at = [&](int64_t t) {
    Tile tile;
    tile.k0 = t % tiles_k * spec.tile_k;
    tile.n0 = t / tiles_k * spec.tile_n;
    tile.rows = static_cast<int>(std::min<int64_t>(spec.tile_k, spec.k - tile.k0));
    tile.columns = static_cast<int>(std::min<int64_t>(spec.tile_n, spec.n - tile.n0));
    return tile;
  };
  ParallelFor(tiles_k * tiles_n, num_threads, [&](int64_t t) {
    Random random(spec.seed * 7919 + static_cast<uint64_t>(t) * 31 + 17);
    tiles[static_cast<size_t>(t)] = MakeTile(spec, tile_at(t), t, random);
  });
  problem.tile_indptr.push_back(0);
  for (const auto& tile : tiles) {
    problem.records.insert(problem.records.end(), tile.begin(), tile.end());
    problem.tile_indptr.push_back(static_cast<uint32_t>(problem.records.size() / 16));
  }
  // Replace: the dense code at an outlier is its zero point.
  ParallelFor(tiles_n, num_threads, [&](int64_t jn) {
    for (int64_t t = jn * tiles_k; t < (jn + 1) * tiles_k; ++t) {
      const Tile tile = tile_at(t);
      for (uint32_t r = problem.tile_indptr[static_cast<size_t>(t)];
           r < problem.tile_indptr[static_cast<size_t>(t) + 1]; ++r) {
        const uint8_t* record = problem.records.data() + static_cast<size_t>(r) * 16;
        for (int s = 0; s < 4; ++s) {
          if (record[8 + 2 * s] == 0 && record[9 + 2 * s] == 0) continue;
          const int64_t n = tile.n0 + record[4 + s];
          const int64_t k = tile.k0 + record[s];
          const int64_t group =
              n * (problem.k_padded / problem.group_size) + k / problem.group_size;
          const int zero = problem.zeros.empty() ? 8 : problem.zeros[static_cast<size_t>(group)];
          uint8_t& byte = problem.qweight[static_cast<size_t>(n * (problem.k_padded / 2) + k / 2)];
          byte =
              static_cast<uint8_t>(k % 2 == 0 ? (byte & 0xf0) | zero : (byte & 0x0f) | zero << 4);
        }
      }
    }
  });
  return problem;
}

std::vector<double> Problem::DenseMatrix() const {
  const int64_t groups = k_padded / group_size;
  std::vector<double> w(static_cast<size_t>(spec.n) * static_cast<size_t>(spec.k));
  for (int64_t n = 0; n < spec.n; ++n) {
    for (int64_t k = 0; k < spec.k; ++k) {
      const uint8_t byte = qweight[static_cast<size_t>(n * (k_padded / 2) + k / 2)];
      const int code = k % 2 == 0 ? byte & 0xf : byte >> 4;
      const auto group = static_cast<size_t>(n * groups + k / group_size);
      const int zero = zeros.empty() ? 8 : zeros[group];
      w[static_cast<size_t>(n * spec.k + k)] = double{FromBf16(scales[group])} * (code - zero);
    }
  }
  const int64_t tiles_k = (spec.k + spec.tile_k - 1) / spec.tile_k;
  for (size_t t = 0; t + 1 < tile_indptr.size(); ++t) {
    for (uint32_t r = tile_indptr[t]; r < tile_indptr[t + 1]; ++r) {
      for (size_t s = 0; s < 4; ++s) {
        const uint8_t* record = records.data() + static_cast<size_t>(r) * 16;
        const int64_t k = static_cast<int64_t>(t) % tiles_k * spec.tile_k + record[s];
        const int64_t n = static_cast<int64_t>(t) / tiles_k * spec.tile_n + record[4 + s];
        uint16_t value = 0;
        std::memcpy(&value, record + 8 + 2 * s, 2);
        w[static_cast<size_t>(n * spec.k + k)] += double{FromBf16(value)};
      }
    }
  }
  return w;
}

}  // namespace flashquant::bench
