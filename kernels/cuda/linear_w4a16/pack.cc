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
constexpr uint16_t kZeroPoint8AsBf16 = 0x4308;
constexpr uint8_t kTwoZeroCodes = 0x88;

struct Slot {
  uint16_t position = 0;  // feature in the window * 16 + channel in the octet
  uint16_t value = 0;
};

// Outliers of one window by octet of channels.
using WindowSlots = std::array<std::vector<Slot>, kOctetsPerStrip>;
using Fragment = std::array<Slot, kSlotsPerFragment>;

struct WindowFragments {
  std::vector<Fragment> fragments;
  std::array<int, kOctetsPerStrip> ends{};
};

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

size_t ClassOf(const Slot& slot) { return (slot.position >> 4) % kNumClasses; }

// Fills fragments so that the eight features of each are of different classes as far as possible
// (the eight 16-byte rows that one ldmatrix phase reads then lie in different banks): each time one
// slot of every class that still has any, the longest classes first.
void AppendFragments(std::vector<Slot> slots, std::vector<Fragment>& fragments) {
  std::stable_sort(slots.begin(), slots.end(),
                   [](const Slot& a, const Slot& b) { return a.position < b.position; });
  std::array<std::vector<Slot>, kNumClasses> classes;
  for (const Slot& slot : slots) classes[ClassOf(slot)].push_back(slot);
  std::array<size_t, kNumClasses> used{};
  std::array<size_t, kNumClasses> order{0, 1, 2, 3, 4, 5, 6, 7};
  auto remaining = [&](size_t c) { return classes[c].size() - used[c]; };
  size_t left = slots.size();
  while (left > 0) {
    Fragment fragment;
    size_t filled = 0;
    while (filled < fragment.size() && left > 0) {
      std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return remaining(a) != remaining(b) ? remaining(a) > remaining(b) : a < b;
      });
      for (size_t c : order) {
        if (remaining(c) == 0 || filled == fragment.size()) break;
        fragment[filled++] = classes[c][used[c]++];
        --left;
      }
    }
    // Empty slots read a row that the fragment reads anyway.
    for (size_t i = filled; i < fragment.size(); ++i) fragment[i].position = fragment[0].position;
    fragments.push_back(fragment);
  }
}

WindowFragments MakeFragments(WindowSlots& window) {
  WindowFragments out;
  for (size_t octet = 0; octet < window.size(); ++octet) {
    AppendFragments(std::move(window[octet]), out.fragments);
    out.ends[octet] = static_cast<int>(out.fragments.size());
  }
  return out;
}

class Packer {
 public:
  Packer(const Int4Arrays& weight, const TileCooPointers& outliers)
      : weight_(weight), outliers_(outliers) {
    out_.n = static_cast<int32_t>(weight.n);
    out_.k = static_cast<int32_t>(weight.k);
    out_.num_strips = static_cast<int32_t>((weight.n + kStripN - 1) / kStripN);
    out_.num_chunks = static_cast<int32_t>((weight.k + kChunkK - 1) / kChunkK);
    out_.num_windows = (out_.num_chunks + kWindowChunks - 1) / kWindowChunks;
    out_.groups_per_chunk = weight.group_size < kChunkK && weight.group_size < weight.k_padded
                                ? static_cast<int32_t>(kChunkK / weight.group_size)
                                : 1;
    out_.has_zeros = weight.zeros != nullptr;
    dense_bytes_ = DenseBytes(out_.groups_per_chunk, out_.has_zeros);
    strips_per_column_ = outliers.tile_indptr == nullptr ? 1 : outliers.tile_n / kStripN;
    num_columns_ = (out_.num_strips + strips_per_column_ - 1) / strips_per_column_;
  }

  PackedLinear Pack(int num_threads) {
    num_fragments_.resize(static_cast<size_t>(out_.num_strips) *
                          static_cast<size_t>(out_.num_windows));
    ParallelFor(num_columns_, num_threads, [&](int64_t column) {
      ForEachWindow(column, [&](size_t window, WindowSlots& slots) {
        size_t fragments = 0;
        for (const std::vector<Slot>& octet : slots) {
          fragments += (octet.size() + kSlotsPerFragment - 1) / kSlotsPerFragment;
        }
        num_fragments_[window] = static_cast<int>(fragments);
      });
    });
    LayOutRecords();
    ParallelFor(num_columns_, num_threads, [&](int64_t column) {
      ForEachWindow(column, [&](size_t window, WindowSlots& slots) { WriteWindow(window, slots); });
    });
    return std::move(out_);
  }

 private:
  // Calls visit(window, its outliers) for the windows of the strips in a column of tiles.
  template <typename Visitor>
  void ForEachWindow(int64_t column, Visitor&& visit) {
    const int64_t first_strip = column * strips_per_column_;
    const int64_t num_strips = std::min<int64_t>(strips_per_column_, out_.num_strips - first_strip);
    std::vector<WindowSlots> windows(static_cast<size_t>(num_strips * out_.num_windows));
    if (outliers_.tile_indptr != nullptr) GatherOutliers(column, windows);
    for (size_t i = 0; i < windows.size(); ++i) {
      visit(static_cast<size_t>(first_strip * out_.num_windows) + i, windows[i]);
    }
  }

  void GatherOutliers(int64_t column, std::vector<WindowSlots>& windows) const {
    constexpr int64_t kWindowK = kWindowChunks * kChunkK;
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
          const int n = record[4 + s];  // inside the column of tiles
          slot.position = static_cast<uint16_t>(k % kWindowK * 16 + n % 8);
          windows[static_cast<size_t>(n / kStripN * out_.num_windows + k / kWindowK)]
                 [static_cast<size_t>(n % kStripN / 8)]
                     .push_back(slot);
        }
      }
    }
  }

  void LayOutRecords() {
    uint32_t offset = 0;
    auto add = [&](int bytes, int chunk, bool dense) {
      out_.records.push_back(
          {offset, static_cast<uint16_t>(bytes / 16), static_cast<uint16_t>(chunk), dense});
      if (!dense) out_.max_outlier_bytes = std::max(out_.max_outlier_bytes, bytes);
      offset += static_cast<uint32_t>(bytes / 16);
    };
    for (size_t window = 0; window < num_fragments_.size(); ++window) {
      out_.window_begin.push_back(static_cast<uint32_t>(out_.records.size()));
      const int first =
          static_cast<int>(window % static_cast<size_t>(out_.num_windows)) * kWindowChunks;
      const int last = std::min(first + kWindowChunks, out_.num_chunks);
      for (int chunk = first; chunk < last; ++chunk) add(dense_bytes_, chunk, true);
      for (int left = num_fragments_[window]; left > 0; left -= kMaxFragments) {
        add(kOutlierHeaderBytes + std::min(left, kMaxFragments) * kFragmentBytes, first, false);
      }
    }
    out_.dense_bytes = dense_bytes_;
    out_.window_begin.push_back(static_cast<uint32_t>(out_.records.size()));
    out_.bytes.resize(static_cast<size_t>(offset) * 16);
  }

  void WriteWindow(size_t window, WindowSlots& slots) {
    const WindowFragments fragments = MakeFragments(slots);
    const auto strip = static_cast<int64_t>(window) / out_.num_windows;
    int first = 0;
    for (uint32_t r = out_.window_begin[window]; r < out_.window_begin[window + 1]; ++r) {
      const PackedRecord& record = out_.records[r];
      uint8_t* out = out_.bytes.data() + static_cast<size_t>(record.offset) * 16;
      if (record.dense) {
        WriteDense(strip * kStripN, int64_t{record.chunk} * kChunkK, out);
      } else {
        WriteFragments(fragments, first, out);
        first += kMaxFragments;
      }
    }
  }

  static void WriteFragments(const WindowFragments& window, int first, uint8_t* out) {
    const int last = std::min(first + kMaxFragments, static_cast<int>(window.fragments.size()));
    std::memset(out, 0, kOutlierHeaderBytes);
    for (size_t octet = 0; octet < kOctetsPerStrip; ++octet) {
      out[octet] = static_cast<uint8_t>(std::clamp(window.ends[octet], first, last) - first);
    }
    out += kOutlierHeaderBytes;
    for (int f = first; f < last; ++f) {
      const Fragment& fragment = window.fragments[static_cast<size_t>(f)];
      for (size_t pair = 0; pair < kSlotsPerFragment / 2; ++pair) {
        const Slot& low = fragment[2 * pair];
        const Slot& high = fragment[2 * pair + 1];
        const std::array<uint16_t, 4> words = {low.position, high.position, low.value, high.value};
        std::memcpy(out, words.data(), 8);
        out += 8;
      }
    }
  }

  uint8_t CodePair(int64_t n, int64_t k) const {
    if (n >= weight_.n_padded || k >= weight_.k_padded) return kTwoZeroCodes;
    return weight_.qweight[n * (weight_.k_padded / 2) + k / 2];
  }

  void WriteDense(int64_t n0, int64_t k0, uint8_t* out) const {
    for (int64_t pair = 0; pair < kChunkK / 32; ++pair) {
      for (int64_t lane = 0; lane < 32; ++lane) {
        for (int64_t i = 0; i < 4; ++i) {  // step, block
          uint32_t word = 0;
          for (int64_t r = 0; r < 4; ++r) {
            const uint32_t codes =
                CodePair(n0 + 16 * (i % 2) + lane / 4 + 8 * (r % 2),
                         k0 + 32 * pair + 16 * (i / 2) + 2 * (lane % 4) + 8 * (r / 2));
            word |= (codes & 0xf) << (4 * r) | (codes >> 4) << (4 * r + 16);
          }
          std::memcpy(out, &word, 4);
          out += 4;
        }
      }
    }
    WriteScales(n0, k0, out);
  }

  // Scales, then zero points, of the strip's channels in the order of packed_format.h.
  void WriteScales(int64_t n0, int64_t k0, uint8_t* out) const {
    const int64_t groups_per_row = weight_.k_padded / weight_.group_size;
    for (int part = 0; part < (out_.has_zeros ? 2 : 1); ++part) {
      for (int64_t group = 0; group < out_.groups_per_chunk; ++group) {
        const int64_t k = k0 + group * (kChunkK / out_.groups_per_chunk);
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
  int dense_bytes_ = 0;
  int64_t strips_per_column_ = 1;
  int64_t num_columns_ = 0;
  std::vector<int> num_fragments_;  // by window
  PackedLinear out_;
};

}  // namespace

PackedLinear PackLinear(const Int4Arrays& weight, const TileCooPointers& outliers,
                        int num_threads) {
  return Packer(weight, outliers).Pack(num_threads);
}

}  // namespace flashquant::cuda
