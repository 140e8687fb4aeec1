// See pack.h. Work is split by columns of Tile-COO tiles, which own whole strips: sizes first, then
// a running sum, then the bytes.
#include "kernels/cuda/linear_w4a16/pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

namespace flashquant::cuda {
namespace {

constexpr size_t kNumClasses = 8;  // features with equal k % 8 share a bank group of shared memory
constexpr size_t kMmaSlots = 16;   // slots of one MMA: four quads
constexpr uint16_t kZeroPoint8AsBf16 = 0x4308;
constexpr uint8_t kTwoZeroCodes = 0x88;
constexpr uint32_t kSignBits = 0x88888888;

struct Slot {
  uint16_t position = 0;
  uint16_t value = 0;
};

uint16_t Position(int64_t feature, int64_t channel) {
  return static_cast<uint16_t>(channel % 16 | int64_t{XRow(static_cast<uint32_t>(feature))} << 4 |
                               channel / 16 << 12);
}

// Outliers of one unit by block of channels.
using UnitSlots = std::array<std::vector<Slot>, kBlocksPerStrip>;

void ParallelFor(int64_t count, int num_threads, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;
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

size_t QuadsOf(size_t slots) { return (slots + kSlotsPerQuad - 1) / kSlotsPerQuad; }

uint32_t RecordBytes(size_t slots) {
  if (slots == 0) return 0;
  const size_t last = (slots - 1) % kMaxPieceSlots + 1;
  return static_cast<uint32_t>((slots - last) / kMaxPieceSlots * kMaxPieceBytes +
                               (QuadsOf(last) + 1) * kQuadBytes);
}

// Orders a block's slots, of which the first stands at `begin` in its piece, so that the eight
// 16-byte rows of x that one ldmatrix phase reads lie in different banks as far as possible. An MMA
// takes 16 slots from the quad on in which the block begins; slots 0, 1 of each quad are its first
// matrix and 2, 3 its second.
void OrderForBanks(size_t begin, std::vector<Slot>& slots) {
  std::stable_sort(slots.begin(), slots.end(),
                   [](const Slot& a, const Slot& b) { return a.position < b.position; });
  std::array<std::vector<Slot>, kNumClasses> classes;
  for (const Slot& slot : slots) classes[(slot.position >> 4) % kNumClasses].push_back(slot);
  std::array<size_t, kNumClasses> used{};
  auto remaining = [&](size_t c) { return classes[c].size() - used[c]; };
  const size_t skipped = begin % kSlotsPerQuad;  // slots of the block before, in the first quad
  const size_t end = skipped + slots.size();
  for (size_t mma = 0; mma < end; mma += kMmaSlots) {
    for (size_t matrix = 0; matrix < 2; ++matrix) {
      std::array<bool, kNumClasses> taken{};
      for (size_t i = 0; i < kMmaSlots; ++i) {
        const size_t at = mma + i;
        if (i / 2 % 2 != matrix || at < skipped || at >= end) continue;
        size_t best = kNumClasses;
        for (size_t c = 0; c < kNumClasses; ++c) {
          if (remaining(c) == 0) continue;
          if (best == kNumClasses || (taken[best] && !taken[c]) ||
              (taken[best] == taken[c] && remaining(c) > remaining(best))) {
            best = c;
          }
        }
        taken[best] = true;
        slots[at - skipped] = classes[best][used[best]++];
      }
    }
  }
}

// Writes one piece; the blocks' slots are ordered in place.
void WritePiece(UnitSlots& piece, uint8_t* out) {
  std::vector<Slot> slots;
  const size_t first = piece[0].size();
  for (std::vector<Slot>& block : piece) {
    OrderForBanks(slots.size(), block);
    slots.insert(slots.end(), block.begin(), block.end());
  }
  const size_t quads = QuadsOf(slots.size());
  const size_t second = first / kSlotsPerQuad;
  const std::array<uint16_t, 8> trailer = {
      static_cast<uint16_t>(second * kQuadBytes),
      static_cast<uint16_t>(std::max(QuadsOf(first), quads - second) * kQuadBytes)};
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
          index[unit].num_16bytes = RecordBytes(NumSlots(slots)) / 16;
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
      offset += ref.num_16bytes;
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
          if (slot.value == 0) continue;
          const int64_t k = ik * outliers_.tile_k + record[s];
          const int64_t n = record[4 + s];  // inside the column of tiles
          slot.position = Position(k % kUnitK, n % kStripN);
          units[static_cast<size_t>(n / kStripN * layout_.num_units + k / kUnitK)]
               [static_cast<size_t>(n % kStripN / 16)]
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
      WriteCodes(strip * kStripN, chunk * kChunkK, out);
      WriteScales(strip * kStripN, chunk * kChunkK, out + kCodeBytes);
    }
  }

  uint8_t CodePair(int64_t n, int64_t k) const {
    if (n >= weight_.n_padded || k >= weight_.k_padded) return kTwoZeroCodes;
    return weight_.qweight[n * (weight_.k_padded / 2) + k / 2];
  }

  void WriteCodes(int64_t n0, int64_t k0, uint8_t* out) const {
    for (int64_t pair = 0; pair < kChunkK / 32; ++pair) {
      for (int64_t lane = 0; lane < 32; ++lane) {
        for (int64_t i = 0; i < 4; ++i) {  // step, block
          uint32_t word = 0;
          for (int64_t r = 0; r < 4; ++r) {
            const uint32_t codes =
                CodePair(n0 + 16 * (i % 2) + lane / 4 + 8 * (r % 2),
                         k0 + 32 * pair + 16 * (i / 2) + 4 * (lane % 4) + 2 * (r / 2));
            word |= (codes & 0xf) << (4 * r) | (codes >> 4) << (4 * r + 16);
          }
          word ^= kSignBits;
          std::memcpy(out, &word, 4);
          out += 4;
        }
      }
    }
  }

  // Scales, then zero points, of the strip's channels in the order of packed_format.h.
  void WriteScales(int64_t n0, int64_t k0, uint8_t* out) const {
    const int64_t groups_per_row = weight_.k_padded / weight_.group_size;
    for (int part = 0; part < (layout_.has_zeros ? 2 : 1); ++part) {
      for (int64_t group = 0; group < layout_.groups_per_chunk; ++group) {
        const int64_t k = k0 + group * (kChunkK / layout_.groups_per_chunk);
        for (int64_t i = 0; i < kStripN; ++i) {
          const int64_t n = n0 + i % 4 / 2 * 16 + i / 4 + i % 2 * 8;
          uint16_t value = part == 0 ? uint16_t{0} : kZeroPoint8AsBf16;
          if (n < weight_.n_padded && k < weight_.k_padded) {
            const int64_t index = n * groups_per_row + k / weight_.group_size;
            value = part == 0 ? weight_.scales[index]
                              : static_cast<uint16_t>(0x4300 | weight_.zeros[index]);
          }
          std::memcpy(out, &value, 2);
          out += 2;
        }
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
  const int64_t units = int64_t{layout.num_strips} * layout.num_units;
  layout.index_offset = units * layout.unit_dense_bytes;
  layout.outliers_offset =
      layout.index_offset + (units * static_cast<int64_t>(sizeof(OutlierRef)) + 15) / 16 * 16;
  layout.num_bytes = layout.outliers_offset;
  return layout;
}

PackedLinear PackLinear(const Int4Arrays& weight, const TileCooPointers& outliers,
                        int num_threads) {
  return Packer(weight, outliers).Pack(num_threads);
}

}  // namespace flashquant::cuda
