// See plan.h.
#include "kernels/cuda/linear_w4a16/plan.h"

#include <algorithm>

namespace flashquant::cuda {
namespace {

// Rows stay whole in a block when that costs at most this much more than an even split: it saves a
// partial sum in global memory at both ends.
constexpr double kWholeRowsTolerance = 1.06;

// Instructions of a warp for a byte of outliers, in those for a byte of codes.
constexpr int64_t kOutlierWorkPerByte = 3;

class Planner {
 public:
  Planner(const PackedLinear& packed, const PlanOptions& options)
      : packed_(packed), unit_chunks_(static_cast<uint32_t>(options.unit_chunks)) {
    plan_.num_slices =
        std::max(1, std::min({options.num_slices, packed.num_windows, options.num_blocks}));
    plan_.num_blocks = options.num_blocks;
    plan_.num_warps = options.num_warps;
    plan_.stage_bytes =
        std::max(options.unit_chunks * packed.dense_bytes, packed.max_outlier_bytes);
    plan_.warps.resize(static_cast<size_t>(plan_.num_blocks * plan_.num_warps));
  }

  LinearPlan Make() {
    AddUnits();
    CutSlices();
    NumberPieces();
    return std::move(plan_);
  }

 private:
  // First window of a slice.
  int SliceBegin(int slice) const {
    return static_cast<int>(static_cast<int64_t>(packed_.num_windows) * slice / plan_.num_slices);
  }
  int SliceChunks(int slice) const {
    return std::min(SliceBegin(slice + 1) * kWindowChunks, packed_.num_chunks) -
           SliceBegin(slice) * kWindowChunks;
  }

  void AddUnits() {
    bytes_.push_back(0);
    work_.push_back(0);
    for (int slice = 0; slice < plan_.num_slices; ++slice) {
      plan_.slice_chunks = std::max(plan_.slice_chunks, SliceChunks(slice));
      for (int strip = 0; strip < packed_.num_strips; ++strip) {
        row_begin_.push_back(plan_.units.size());
        const auto first = static_cast<size_t>(strip) * static_cast<size_t>(packed_.num_windows);
        AddRecords(packed_.window_begin[first + static_cast<size_t>(SliceBegin(slice))],
                   packed_.window_begin[first + static_cast<size_t>(SliceBegin(slice + 1))],
                   SliceBegin(slice) * kWindowChunks);
        plan_.units[row_begin_.back()].flags |= kUnitRowStart;
        plan_.units.back().flags |= kUnitRowEnd;
      }
    }
    row_begin_.push_back(plan_.units.size());
  }

  void AddRecords(uint32_t begin, uint32_t end, int slice_chunk) {
    for (uint32_t r = begin; r < end;) {
      const PackedRecord& first = packed_.records[r];
      uint32_t size = 0;
      uint32_t num_dense = 0;
      do {
        size += packed_.records[r].num_16bytes;
        num_dense += first.dense ? 1 : 0;
        ++r;
      } while (first.dense && num_dense < unit_chunks_ && r < end && packed_.records[r].dense &&
               packed_.records[r].chunk == first.chunk + num_dense);
      Unit unit;
      unit.offset = first.offset;
      unit.flags = size | static_cast<uint32_t>(first.chunk - slice_chunk) << kUnitChunkShift |
                   num_dense << kUnitDenseShift;
      plan_.units.push_back(unit);
      bytes_.push_back(bytes_.back() + size);
      work_.push_back(work_.back() + (num_dense > 0 ? size : size * kOutlierWorkPerByte));
    }
  }

  // The unit boundary in [begin, end] nearest to part / parts of the sums between them.
  static size_t NearestCut(const std::vector<int64_t>& sums, size_t begin, size_t end, int part,
                           int parts) {
    const double target = static_cast<double>(sums[begin]) +
                          static_cast<double>(sums[end] - sums[begin]) * part / parts;
    const auto it =
        std::lower_bound(sums.begin() + static_cast<std::ptrdiff_t>(begin),
                         sums.begin() + static_cast<std::ptrdiff_t>(end), target,
                         [](int64_t b, double t) { return static_cast<double>(b) < t; });
    const auto cut = static_cast<size_t>(it - sums.begin());
    if (cut > begin &&
        target - static_cast<double>(sums[cut - 1]) < static_cast<double>(sums[cut]) - target) {
      return cut - 1;
    }
    return cut;
  }

  // Blocks in proportion to bytes, at least one for each slice.
  void CutSlices() {
    const auto strips = static_cast<size_t>(packed_.num_strips);
    int block = 0;
    for (int slice = 0; slice < plan_.num_slices; ++slice) {
      const size_t end = row_begin_[strips * static_cast<size_t>(slice + 1)];
      const int later_slices = plan_.num_slices - slice - 1;
      const auto wanted = static_cast<int>(static_cast<double>(plan_.num_blocks) *
                                               static_cast<double>(bytes_[end]) /
                                               static_cast<double>(bytes_.back()) +
                                           0.5);
      const int last_block = later_slices == 0
                                 ? plan_.num_blocks
                                 : std::clamp(wanted, block + 1, plan_.num_blocks - later_slices);
      CutBlocks(slice, block, last_block);
      block = last_block;
    }
  }

  void CutBlocks(int slice, int first_block, int last_block) {
    const int parts = last_block - first_block;
    const auto first_row = static_cast<size_t>(slice) * static_cast<size_t>(packed_.num_strips);
    const size_t last_row = first_row + static_cast<size_t>(packed_.num_strips);
    const size_t begin = row_begin_[first_row];
    const size_t end = row_begin_[last_row];
    std::vector<size_t> cuts = {begin};
    const std::vector<size_t> whole = WholeRowCuts(first_row, last_row, parts);
    for (int i = 1; i < parts; ++i) {
      cuts.push_back(whole.empty() ? std::max(cuts.back(), NearestCut(bytes_, begin, end, i, parts))
                                   : whole[static_cast<size_t>(i)]);
    }
    cuts.push_back(end);
    // Blocks with work come first: the pieces of a row are numbered by block, without gaps.
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    cuts.resize(static_cast<size_t>(parts) + 1, end);
    for (int i = 0; i < parts; ++i) {
      CutWarps(slice, first_block + i, cuts[static_cast<size_t>(i)],
               cuts[static_cast<size_t>(i) + 1]);
    }
  }

  // Cuts at row boundaries, or nothing when the fullest block would have too much more than its
  // share.
  std::vector<size_t> WholeRowCuts(size_t first_row, size_t last_row, int parts) const {
    const size_t rows = last_row - first_row;
    const size_t rows_per_block =
        (rows + static_cast<size_t>(parts) - 1) / static_cast<size_t>(parts);
    const double share =
        static_cast<double>(bytes_[row_begin_[last_row]] - bytes_[row_begin_[first_row]]) / parts;
    std::vector<size_t> cuts;
    for (size_t i = 0; i < static_cast<size_t>(parts); ++i) {
      const size_t row = std::min(first_row + i * rows_per_block, last_row);
      const size_t next = std::min(row + rows_per_block, last_row);
      cuts.push_back(row_begin_[row]);
      const int64_t bytes = bytes_[row_begin_[next]] - bytes_[row_begin_[row]];
      if (static_cast<double>(bytes) > share * kWholeRowsTolerance) return {};
    }
    return cuts;
  }

  void CutWarps(int slice, int block, size_t begin, size_t end) {
    size_t warp_begin = begin;
    int first_slots = 0;
    WarpPlan common;
    common.slice_chunk = static_cast<uint32_t>(SliceBegin(slice) * kWindowChunks);
    common.slice_chunks = static_cast<uint32_t>(SliceChunks(slice));
    if (begin < end) SetChunks(begin, end, common);
    for (int w = 0; w < plan_.num_warps; ++w) {
      const size_t warp_end =
          w + 1 == plan_.num_warps
              ? end
              : std::max(warp_begin, NearestCut(work_, begin, end, w + 1, plan_.num_warps));
      WarpPlan& warp = plan_.warps[static_cast<size_t>(block * plan_.num_warps + w)];
      warp = common;
      warp.unit_begin = static_cast<uint32_t>(warp_begin);
      warp.num_units = static_cast<uint32_t>(warp_end - warp_begin);
      if (warp_begin < warp_end) {
        const size_t row = RowOf(warp_begin);
        warp.row_begin = static_cast<uint32_t>(row);
        NoteBlock(row, RowOf(warp_end - 1), block);
        if (warp_begin != row_begin_[row] && row_begin_[row + 1] < warp_end) {
          warp.first_slot = static_cast<uint32_t>(first_slots++);
        }
        for (size_t i = 0; i < std::min<size_t>(kPlanUnits, warp_end - warp_begin); ++i) {
          warp.units[i] = plan_.units[warp_begin + i];
        }
      }
      warp_begin = warp_end;
    }
    plan_.num_first_slots = std::max(plan_.num_first_slots, first_slots);
  }

  // Chunks that the units need, as the shortest run from the first unit's window on, cyclically.
  void SetChunks(size_t begin, size_t end, WarpPlan& warp) const {
    const uint32_t num = warp.slice_chunks;
    auto chunk_of = [&](size_t u) {
      return plan_.units[u].flags >> kUnitChunkShift & kUnitChunkMask;
    };
    warp.x_chunk_begin = chunk_of(begin) / kWindowChunks * kWindowChunks;
    warp.x_num_chunks = 1;
    for (size_t u = begin; u < end && warp.x_num_chunks < num; ++u) {
      const uint32_t num_dense = plan_.units[u].flags >> kUnitDenseShift & kUnitDenseMask;
      const uint32_t last =
          std::min(chunk_of(u) + (num_dense > 0 ? num_dense : kWindowChunks), num) - 1;
      warp.x_num_chunks = std::max(warp.x_num_chunks, (last + num - warp.x_chunk_begin) % num + 1);
    }
  }

  size_t RowOf(size_t unit) const {
    return static_cast<size_t>(std::upper_bound(row_begin_.begin(), row_begin_.end(), unit) -
                               row_begin_.begin()) -
           1;
  }

  void NoteBlock(size_t first_row, size_t last_row, int block) {
    if (blocks_.empty()) blocks_.resize(row_begin_.size() - 1, {-1, -1});
    for (size_t row = first_row; row <= last_row; ++row) {
      if (blocks_[row].first < 0) blocks_[row].first = block;
      blocks_[row].second = block;
    }
  }

  void NumberPieces() {
    const auto strips = static_cast<size_t>(packed_.num_strips);
    plan_.rows.resize(blocks_.size());
    uint32_t piece = 0;
    for (size_t strip = 0; strip < strips; ++strip) {
      const uint32_t strip_piece = piece;
      for (size_t row = strip; row < blocks_.size(); row += strips) {
        plan_.rows[row] = {piece, static_cast<uint32_t>(blocks_[row].first), strip_piece, 0};
        piece += static_cast<uint32_t>(blocks_[row].second - blocks_[row].first + 1);
      }
      for (size_t row = strip; row < blocks_.size(); row += strips) {
        plan_.rows[row].strip_pieces = piece - strip_piece;
      }
    }
    plan_.num_pieces = piece;
  }

  const PackedLinear& packed_;
  const uint32_t unit_chunks_;
  LinearPlan plan_;
  std::vector<size_t> row_begin_;            // first unit of each row
  std::vector<int64_t> bytes_;               // before each unit, in 16 bytes
  std::vector<int64_t> work_;                // the same, weighed by a warp's instructions
  std::vector<std::pair<int, int>> blocks_;  // first and last block of each row
};

}  // namespace

LinearPlan MakeLinearPlan(const PackedLinear& packed, const PlanOptions& options) {
  return Planner(packed, options).Make();
}

int ChooseNumSlices(const PackedLinear& packed, int num_blocks, int batch_blocks,
                    int64_t x_bytes_limit) {
  const int64_t chunk_bytes = static_cast<int64_t>(kChunkK) * kRowsPerBatchBlock * 2 * batch_blocks;
  const int64_t longest = std::max<int64_t>(1, x_bytes_limit / chunk_bytes);
  const int64_t cells = static_cast<int64_t>(packed.num_strips) * packed.num_chunks;
  const int64_t share = std::max<int64_t>(1, cells / num_blocks);
  const int64_t chunks = std::min(longest, std::max<int64_t>(share / 2, kWindowChunks));
  return static_cast<int>((packed.num_chunks + chunks - 1) / chunks);
}

}  // namespace flashquant::cuda
