// See paper_format.h.
#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "kernels/cuda/linear_paper/paper_format.h"

namespace flashquant::cuda {
namespace {

constexpr int kRecordSlots = 4;
constexpr int kBankClasses = 4;  // the paper's gid

int64_t RoundUp16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

struct Slot {
  uint8_t row = 0;
  uint16_t value = 0;
};

using Columns = std::array<std::vector<Slot>, kPaperTileN>;

struct PackedTile {
  std::vector<uint8_t> records;
  std::vector<uint16_t> buckets;  // offset and count of each
};

int NumRecords(const std::vector<Slot>& column) {
  return static_cast<int>(column.size() + kRecordSlots - 1) / kRecordSlots;
}

int Class(uint8_t row) { return row / 2 % kBankClasses; }

// By column, rows rising, null slots left out.
Columns ReadTile(const TileCooPointers& outliers, int64_t tile) {
  Columns columns;
  for (uint32_t r = outliers.tile_indptr[tile]; r < outliers.tile_indptr[tile + 1]; ++r) {
    const uint8_t* record = outliers.records + size_t{r} * 16;
    for (size_t s = 0; s < kRecordSlots; ++s) {
      Slot slot{record[s], 0};
      std::memcpy(&slot.value, record + 8 + 2 * s, 2);
      if (slot.value != 0) columns[record[4 + s] % kPaperTileN].push_back(slot);
    }
  }
  for (auto& column : columns) {
    std::sort(column.begin(), column.end(),
              [](const Slot& a, const Slot& b) { return a.row < b.row; });
  }
  return columns;
}

// Columns of each bucket, rising.
std::vector<std::vector<int>> AssignColumns(const Columns& columns, int buckets, PaperOrder order) {
  std::vector<std::vector<int>> out(static_cast<size_t>(buckets));
  if (order == PaperOrder::kNone) {
    for (int column = 0; column < kPaperTileN; ++column) {
      out[static_cast<size_t>(column * buckets / kPaperTileN)].push_back(column);
    }
    return out;
  }
  std::array<int, kPaperTileN> by_load;
  for (int i = 0; i < kPaperTileN; ++i) by_load[static_cast<size_t>(i)] = i;
  const auto load = [&](int column) { return NumRecords(columns[static_cast<size_t>(column)]); };
  std::stable_sort(by_load.begin(), by_load.end(), [&](int a, int b) { return load(a) > load(b); });
  std::vector<int> loads(static_cast<size_t>(buckets));
  for (const int column : by_load) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += load(column);
    out[static_cast<size_t>(least - loads.begin())].push_back(column);
  }
  for (auto& bucket : out) std::sort(bucket.begin(), bucket.end());
  return out;
}

// Takes from `left` the lowest row of class `wanted`, else of the next class that is not used up.
Slot TakeOfClass(std::vector<Slot>& left, int wanted) {
  for (int i = 0; i < kBankClasses; ++i) {
    const auto found = std::find_if(left.begin(), left.end(), [&](const Slot& slot) {
      return Class(slot.row) == (wanted + i) % kBankClasses;
    });
    if (found == left.end()) continue;
    const Slot slot = *found;
    left.erase(found);
    return slot;
  }
  return {};
}

void AppendColumn(std::vector<Slot> left, int column, int bucket, PaperOrder order, size_t first,
                  std::vector<uint8_t>& records) {
  while (!left.empty()) {
    uint8_t record[16] = {};
    const size_t slots = (records.size() - first) / 4;  // of the bucket so far
    for (size_t s = 0; s < kRecordSlots; ++s) {
      Slot slot{record[0], 0};  // null: the record's first row
      if (!left.empty() && order == PaperOrder::kReordered) {
        slot = TakeOfClass(left, (static_cast<int>(slots + s) + bucket) % kBankClasses);
      } else if (!left.empty()) {
        slot = left.front();
        left.erase(left.begin());
      }
      record[s] = slot.row;
      record[4 + s] = static_cast<uint8_t>(column);
      std::memcpy(record + 8 + 2 * s, &slot.value, 2);
    }
    records.insert(records.end(), record, record + 16);
  }
}

PackedTile PackTile(const Columns& columns, int buckets, PaperOrder order) {
  PackedTile tile;
  const std::vector<std::vector<int>> assigned = AssignColumns(columns, buckets, order);
  for (int bucket = 0; bucket < buckets; ++bucket) {
    const size_t first = tile.records.size();
    for (const int column : assigned[static_cast<size_t>(bucket)]) {
      AppendColumn(columns[static_cast<size_t>(column)], column, bucket, order, first,
                   tile.records);
    }
    tile.buckets.push_back(static_cast<uint16_t>(first / 16));
    tile.buckets.push_back(static_cast<uint16_t>((tile.records.size() - first) / 16));
  }
  return tile;
}

int Code(const Int4Arrays& weight, int64_t n, int64_t k) {
  if (n >= weight.n_padded || k >= weight.k_padded) return 0;  // its scale or its x is 0
  const uint8_t pair = weight.qweight[n * (weight.k_padded / 2) + k / 2];
  return k % 2 == 0 ? pair & 0xf : pair >> 4;
}

void PackCodes(const Int4Arrays& weight, int64_t n0, int64_t k0, uint8_t* out) {
  for (int i = 0; i < kPaperCodeBytes / 4; ++i) {
    const int block = i % 4;
    const int lane = i / 4 % 32;
    const int step = i / 128 % (kPaperTileK / 16);
    const int strip = i / (128 * (kPaperTileK / 16));
    uint32_t word = 0;
    for (int r = 0; r < 4; ++r) {
      const int64_t n = n0 + strip * kPaperStripN + block * 16 + lane / 4 + 8 * (r % 2);
      const int64_t k = k0 + step * 16 + 2 * (lane % 4) + 8 * (r / 2);
      word |= static_cast<uint32_t>(Code(weight, n, k)) << (4 * r);
      word |= static_cast<uint32_t>(Code(weight, n, k + 1)) << (4 * r + 16);
    }
    std::memcpy(out + 4 * i, &word, 4);
  }
}

void PackScales(const Int4Arrays& weight, const PaperLayout& layout, int64_t n0, int64_t k0,
                uint8_t* out) {
  const int64_t groups = weight.k_padded / weight.group_size;
  for (int group = 0; group < layout.groups_per_tile; ++group) {
    for (int column = 0; column < kPaperTileN; ++column) {
      const int64_t n = n0 + column;
      const int64_t g = (k0 + group * (kPaperTileK / layout.groups_per_tile)) / weight.group_size;
      const bool inside = n < weight.n_padded && g < groups;
      const uint16_t scale = inside ? weight.scales[n * groups + g] : uint16_t{0};
      const size_t at = static_cast<size_t>(group * kPaperTileN + column) * 2;
      std::memcpy(out + at, &scale, 2);
      if (!layout.has_zeros) continue;
      const auto zero = static_cast<uint16_t>(0x4300 | (inside ? weight.zeros[n * groups + g] : 8));
      std::memcpy(out + layout.groups_per_tile * kPaperTileN * 2 + at, &zero, 2);
    }
  }
}

PaperLayout DensePart(const Int4Arrays& weight) {
  PaperLayout layout;
  layout.n = static_cast<int32_t>(weight.n);
  layout.k = static_cast<int32_t>(weight.k);
  layout.tiles_n = static_cast<int32_t>((weight.n + kPaperTileN - 1) / kPaperTileN);
  layout.tiles_k = static_cast<int32_t>((weight.k + kPaperTileK - 1) / kPaperTileK);
  // Groups of 32, 64 and 128; any other is one group along all of K.
  layout.groups_per_tile =
      weight.group_size >= 32 && weight.group_size <= 128 && kPaperTileK % weight.group_size == 0
          ? static_cast<int32_t>(kPaperTileK / weight.group_size)
          : 1;
  layout.has_zeros = weight.zeros != nullptr;
  layout.tile_dense_bytes =
      kPaperCodeBytes + layout.groups_per_tile * kPaperTileN * 2 * (layout.has_zeros ? 2 : 1);
  layout.indptr_offset = int64_t{layout.tiles_n} * layout.tiles_k * layout.tile_dense_bytes;
  return layout;
}

template <typename Body>
void ParallelTiles(int64_t tiles, int num_threads, Body&& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t tile = t; tile < tiles; tile += num_threads) body(tile);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

PaperLinear PackPaper(const Int4Arrays& weight, const TileCooPointers& outliers, int buckets,
                      PaperOrder order, int num_threads) {
  PaperLinear out;
  PaperLayout& layout = out.layout;
  layout = DensePart(weight);
  const int64_t tiles = int64_t{layout.tiles_n} * layout.tiles_k;
  std::vector<PackedTile> packed(static_cast<size_t>(tiles));
  std::vector<uint32_t> indptr{0};
  if (outliers.tile_indptr != nullptr) {
    layout.buckets_per_tile = buckets;
    ParallelTiles(tiles, num_threads, [&](int64_t tile) {
      packed[static_cast<size_t>(tile)] = PackTile(ReadTile(outliers, tile), buckets, order);
    });
    for (const PackedTile& tile : packed) {
      const auto records = static_cast<int32_t>(tile.records.size() / 16);
      layout.max_records = std::max(layout.max_records, records);
      indptr.push_back(indptr.back() + static_cast<uint32_t>(records));
    }
  }
  const int64_t bucket_bytes = int64_t{layout.buckets_per_tile} * 4;
  layout.buckets_offset = layout.indptr_offset + RoundUp16(static_cast<int64_t>(indptr.size()) * 4);
  layout.records_offset = layout.buckets_offset + RoundUp16(tiles * bucket_bytes);
  layout.num_bytes = layout.records_offset + int64_t{indptr.back()} * 16;
  out.bytes.resize(static_cast<size_t>(layout.num_bytes));
  std::memcpy(out.bytes.data() + layout.indptr_offset, indptr.data(), indptr.size() * 4);
  ParallelTiles(tiles, num_threads, [&](int64_t tile) {
    uint8_t* const dense = out.bytes.data() + tile * layout.tile_dense_bytes;
    const int64_t n0 = tile / layout.tiles_k * kPaperTileN;
    const int64_t k0 = tile % layout.tiles_k * kPaperTileK;
    PackCodes(weight, n0, k0, dense);
    PackScales(weight, layout, n0, k0, dense + kPaperCodeBytes);
    const PackedTile& from = packed[static_cast<size_t>(tile)];
    if (from.records.empty() && from.buckets.empty()) return;
    std::memcpy(out.bytes.data() + layout.buckets_offset + tile * bucket_bytes, from.buckets.data(),
                static_cast<size_t>(bucket_bytes));
    if (from.records.empty()) return;
    std::memcpy(
        out.bytes.data() + layout.records_offset + int64_t{indptr[static_cast<size_t>(tile)]} * 16,
        from.records.data(), from.records.size());
  });
  return out;
}

}  // namespace flashquant::cuda
