// See pack.h. Work is split by columns of Tile-COO tiles, which own whole strips: sizes first, then
// a running sum, then the bytes.
#include "kernels/cuda/linear_w4a16/pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include "kernels/base/math_util.h"
#include "kernels/cuda/linear_w4a16/pack_rules.h"

namespace flashquant::cuda {
namespace {

struct Slot {
  uint16_t position = 0;
  uint16_t value = 0;
};

// Outliers of one unit by block of channels.
using UnitSlots = std::array<std::vector<Slot>, kBlocksPerStrip>;

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

size_t NumSlots(const UnitSlots& unit) {
  size_t slots = 0;
  for (const std::vector<Slot>& block : unit) slots += block.size();
  return slots;
}

// See pack_rules.h.
void OrderBlock(size_t begin, std::vector<Slot>& slots) {
  std::stable_sort(slots.begin(), slots.end(), [](const Slot& a, const Slot& b) {
    return SlotSortKey(a.position) < SlotSortKey(b.position);
  });
  std::array<uint16_t, kBankClasses + 1> class_begin{};
  for (const Slot& slot : slots) ++class_begin[static_cast<size_t>(BankClass(slot.position)) + 1];
  std::partial_sum(class_begin.begin(), class_begin.end(), class_begin.begin());
  std::vector<uint16_t> order(slots.size());
  OrderForBanks(static_cast<int>(begin), class_begin.data(), order.data());
  const std::vector<Slot> sorted = slots;
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = sorted[order[i]];
}

// Writes one piece; the blocks' slots are ordered in place.
void WritePiece(UnitSlots& piece, uint8_t* out) {
  std::vector<Slot> slots;
  const size_t first = piece[0].size();
  for (std::vector<Slot>& block : piece) {
    OrderBlock(slots.size(), block);
    slots.insert(slots.end(), block.begin(), block.end());
  }
  const std::array<uint32_t, 4> trailer = {
      TrailerWord(static_cast<int>(first), static_cast<int>(slots.size()))};
  const auto quads = static_cast<size_t>(QuadsOf(static_cast<int>(slots.size())));
  slots.resize(quads * kSlotsPerQuad);
  for (size_t i = 0; i < slots.size(); ++i) {
    uint8_t* quad = out + i / kSlotsPerQuad * kQuadBytes + i % kSlotsPerQuad * 2;
    std::memcpy(quad, &slots[i].position, 2);
    std::memcpy(quad + 8, &slots[i].value, 2);
  }
  std::memcpy(out + quads * kQuadBytes, trailer.data(), kQuadBytes);
}

void WriteRecord(UnitSlots& unit, uint8_t* out) {
  UnitSlots piece;
  size_t in_piece = 0;
  for (size_t block = 0; block < unit.size(); ++block) {
    for (const Slot& slot : unit[block]) {
      if (in_piece == kMaxPieceSlots) {
        WritePiece(piece, out);
        out += kMaxPieceBytes;
        piece = {};
        in_piece = 0;
      }
      piece[block].push_back(slot);
      ++in_piece;
    }
  }
  WritePiece(piece, out);
}

class Packer {
 public:
  Packer(const Int4Arrays& weight, const TileCooPointers& outliers)
      : weight_(weight), outliers_(outliers), layout_(DenseLayout(weight)) {
    strips_per_column_ = outliers.tile_indptr == nullptr ? 1 : outliers.tile_n / kStripN;
    num_columns_ = (layout_.num_strips + strips_per_column_ - 1) / strips_per_column_;
  }

  PackedLinear Pack(int num_threads) {
    std::vector<OutlierRef> index(static_cast<size_t>(layout_.num_strips) *
                                  static_cast<size_t>(layout_.num_units));
    if (outliers_.tile_indptr != nullptr) {
      ParallelFor(num_columns_, num_threads, [&](int64_t column) {
        ForEachUnit(column, [&](size_t unit, UnitSlots& slots) {
          index[unit].num_16bytes = RecordBytes(static_cast<int>(NumSlots(slots))) / 16;
        });
      });
    }
    LayOutOutliers(index);
    PackedLinear out;
    out.layout = layout_;
    out.bytes.resize(static_cast<size_t>(layout_.num_bytes));
    std::memcpy(out.bytes.data() + layout_.index_offset, index.data(),
                index.size() * sizeof(OutlierRef));
    ParallelFor(layout_.num_strips, num_threads,
                [&](int64_t strip) { WriteDenseStrip(strip, out.bytes.data()); });
    if (outliers_.tile_indptr != nullptr) {
      ParallelFor(num_columns_, num_threads, [&](int64_t column) {
        ForEachUnit(column, [&](size_t unit, UnitSlots& slots) {
          if (index[unit].num_16bytes == 0) return;
          WriteRecord(slots, out.bytes.data() + layout_.outliers_offset +
                                 static_cast<int64_t>(index[unit].offset) * 16);
        });
      });
    }
    return out;
  }

 private:
  void LayOutOutliers(std::vector<OutlierRef>& index) {
    uint32_t offset = 0;
    uint32_t most = 0;
    for (OutlierRef& ref : index) {
      ref.offset = offset;
      offset += AlignedRecord(ref.num_16bytes);
      most = std::max(most, ref.num_16bytes);
    }
    layout_.max_outlier_bytes = static_cast<int32_t>(most * 16);
    layout_.num_bytes = layout_.outliers_offset + int64_t{offset} * 16;
  }

  // Calls visit(unit, its outliers) for the units of the strips in a column of tiles.
  template <typename Visitor>
  void ForEachUnit(int64_t column, Visitor&& visit) {
    const int64_t first_strip = column * strips_per_column_;
    const int64_t num_strips =
        std::min<int64_t>(strips_per_column_, layout_.num_strips - first_strip);
    std::vector<UnitSlots> units(static_cast<size_t>(num_strips * layout_.num_units));
    GatherOutliers(column, units);
    for (size_t i = 0; i < units.size(); ++i) {
      visit(static_cast<size_t>(first_strip * layout_.num_units) + i, units[i]);
    }
  }

  void GatherOutliers(int64_t column, std::vector<UnitSlots>& units) const {
    const int64_t tiles_k = (weight_.k + outliers_.tile_k - 1) / outliers_.tile_k;
    for (int64_t ik = 0; ik < tiles_k; ++ik) {
      const int64_t tile = column * tiles_k + ik;
      for (uint32_t r = outliers_.tile_indptr[tile]; r < outliers_.tile_indptr[tile + 1]; ++r) {
        const uint8_t* record = outliers_.records + static_cast<size_t>(r) * 16;
        for (int s = 0; s < 4; ++s) {
          Slot slot;
          std::memcpy(&slot.value, record + 8 + 2 * s, 2);
          slot.value = StoredOutlier(slot.value);
          if (slot.value == 0) continue;
          const int64_t k = ik * outliers_.tile_k + record[s];
          const int64_t n = record[4 + s];  // inside the column of tiles
          slot.position =
              SlotPosition(static_cast<uint32_t>(k % kUnitK), static_cast<uint32_t>(n % kStripN));
          units[static_cast<size_t>(n / kStripN * layout_.num_units + k / kUnitK)]
               [BlockOf(static_cast<uint32_t>(n % kStripN))]
                   .push_back(slot);
        }
      }
    }
  }

  void WriteDenseStrip(int64_t strip, uint8_t* out) const {
    const int64_t chunk_bytes = layout_.unit_dense_bytes / kUnitChunks;
    const int64_t num_chunks = int64_t{layout_.num_units} * kUnitChunks;
    out += strip * num_chunks * chunk_bytes;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk, out += chunk_bytes) {
      const int64_t n0 = strip * kStripN;
      const int64_t k0 = chunk * kChunkK;
      for (int i = 0; i < kCodeWordsPerChunk; ++i) {
        const uint32_t word = CodeWord(weight_, n0, k0, i);
        std::memcpy(out + 4 * i, &word, 4);
      }
      for (int i = 0; i < ScaleEntriesPerChunk(layout_); ++i) {
        const uint16_t entry = ScaleEntry(weight_, layout_, n0, k0, i);
        std::memcpy(out + kCodeBytes + 2 * i, &entry, 2);
      }
    }
  }

  const Int4Arrays& weight_;
  const TileCooPointers& outliers_;
  PackedLayout layout_;
  int64_t strips_per_column_ = 1;
  int64_t num_columns_ = 0;
};

}  // namespace

void SetOffsets(PackedLayout* layout) {
  const int64_t units = int64_t{layout->num_strips} * layout->num_units;
  layout->index_offset = units * layout->unit_dense_bytes;
  layout->outliers_offset =
      layout->index_offset + RoundUp(units * int64_t{sizeof(OutlierRef)}, int64_t{kCopyAlignment});
}

PackedLayout DenseLayout(const Int4Arrays& weight) {
  PackedLayout layout;
  layout.n = static_cast<int32_t>(weight.n);
  layout.k = static_cast<int32_t>(weight.k);
  layout.num_strips = static_cast<int32_t>((weight.n + kStripN - 1) / kStripN);
  layout.num_units = static_cast<int32_t>((weight.k + kUnitK - 1) / kUnitK);
  layout.groups_per_chunk = weight.group_size < kChunkK && weight.group_size < weight.k_padded
                                ? static_cast<int32_t>(kChunkK / weight.group_size)
                                : 1;
  layout.has_zeros = weight.zeros != nullptr;
  layout.unit_dense_bytes =
      kUnitChunks * ChunkDenseBytes(layout.groups_per_chunk, layout.has_zeros);
  SetOffsets(&layout);
  layout.num_bytes = layout.outliers_offset;
  return layout;
}

PackedLinear PackLinear(const Int4Arrays& weight, const TileCooPointers& outliers,
                        int num_threads) {
  return Packer(weight, outliers).Pack(num_threads);
}

}  // namespace flashquant::cuda
