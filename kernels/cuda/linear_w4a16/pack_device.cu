// See pack_device.h. Dense: a block per chunk, a thread per 16 bytes. Outliers: a warp per unit
// goes through the records of the Tile-COO tiles that the unit lies in, in stored order, and takes
// those of its strip; the other strips of a tile read the same records again, from L2. Ranks by
// comparing every slot with every other of its block: at 3% a block has some 120.
#include <algorithm>

#include "kernels/cuda/linear_w4a16/pack_device.h"
#include "kernels/cuda/linear_w4a16/pack_rules.h"

namespace flashquant::cuda {
namespace {

constexpr int kDenseThreads = 128;
constexpr int kUnitWarps = 4;  // of a block
constexpr int kScanThreads = 1024;
constexpr unsigned kAllLanes = 0xffffffffu;

// The head of the scratch; the index follows.
struct ScratchHead {
  uint32_t total_16bytes;
  uint32_t most_16bytes;
  uint32_t unused[2];
};
static_assert(sizeof(ScratchHead) == 16);

OutlierRef* IndexOf(void* scratch) {
  return reinterpret_cast<OutlierRef*>(static_cast<uint8_t*>(scratch) + sizeof(ScratchHead));
}

int64_t NumUnits(const PackedLayout& layout) {
  return int64_t{layout.num_strips} * layout.num_units;
}

unsigned UnitBlocks(const PackedLayout& layout) {
  return static_cast<unsigned>((NumUnits(layout) + kUnitWarps - 1) / kUnitWarps);
}

__global__ void __launch_bounds__(kDenseThreads)
    PackDenseKernel(Int4Arrays weight, PackedLayout layout, uint8_t* out) {
  const int chunks = layout.num_units * kUnitChunks;  // of a strip
  const int64_t chunk = blockIdx.x;
  const int64_t n0 = chunk / chunks * kStripN;
  const int64_t k0 = chunk % chunks * kChunkK;
  out += chunk * (layout.unit_dense_bytes / kUnitChunks);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kCodeWordsPerChunk / 4; i += kDenseThreads) {
    reinterpret_cast<uint4*>(out)[i] = {
        CodeWord(weight, n0, k0, 4 * i), CodeWord(weight, n0, k0, 4 * i + 1),
        CodeWord(weight, n0, k0, 4 * i + 2), CodeWord(weight, n0, k0, 4 * i + 3)};
  }
  auto* entries = reinterpret_cast<uint16_t*>(out + kCodeBytes);
  for (int i = thread; i < ScaleEntriesPerChunk(layout); i += kDenseThreads) {
    entries[i] = ScaleEntry(weight, layout, n0, k0, i);
  }
}

// Slots of a unit, by block, in the halves of a word.
struct BlockCounts {
  uint32_t packed = 0;

  __device__ int of(int block) const {
    return static_cast<int>(block == 0 ? packed & 0xffff : packed >> 16);
  }
  __device__ int total() const { return of(0) + of(1); }
};
static_assert(kBlocksPerStrip == 2 && 16 * kUnitK < 1 << 16);

__device__ int BlockOfSlot(uint32_t slot) { return static_cast<int>(slot >> 12 & 1); }

// The slots of a lane's record that belong to the unit.
struct LaneSlots {
  uint32_t slots[4];  // position, then value in the high half; 0: not of this unit
  BlockCounts counts;
};

__device__ LaneSlots ReadRecord(uint4 record, int64_t k0, int64_t unit_k0, int first_channel) {
  LaneSlots out = {};
  for (int s = 0; s < 4; ++s) {
    const uint32_t row = record.x >> (8 * s) & 0xff;
    const int channel = static_cast<int>(record.y >> (8 * s) & 0xff) - first_channel;
    const uint32_t value = StoredOutlier((s < 2 ? record.z : record.w) >> (16 * (s % 2)) & 0xffff);
    const int64_t feature = k0 + row - unit_k0;
    if (value == 0 || channel < 0 || channel >= kStripN || feature < 0 || feature >= kUnitK) {
      continue;
    }
    const uint32_t position =
        SlotPosition(static_cast<uint32_t>(feature), static_cast<uint32_t>(channel));
    out.slots[s] = value << 16 | position;
    out.counts.packed += BlockOfSlot(position) == 0 ? 1u : 1u << 16;
  }
  return out;
}

// Calls visit(block, index in the block, slot) for every slot of unit `unit` of `strip`, in stored
// order. All lanes of a warp together.
template <typename Visit>
__device__ BlockCounts VisitSlots(const TileCooPointers& outliers, int64_t k, int strip, int unit,
                                  Visit&& visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int strips_per_tile = outliers.tile_n / kStripN;
  const int64_t tiles_k = (k + outliers.tile_k - 1) / outliers.tile_k;
  const int64_t unit_k0 = int64_t{unit} * kUnitK;
  const int64_t last = min(tiles_k, (unit_k0 + kUnitK + outliers.tile_k - 1) / outliers.tile_k);
  const int first_channel = strip % strips_per_tile * kStripN;
  const auto* records = reinterpret_cast<const uint4*>(outliers.records);
  BlockCounts before;
  for (int64_t ik = unit_k0 / outliers.tile_k; ik < last; ++ik) {
    const int64_t tile = strip / strips_per_tile * tiles_k + ik;
    const uint32_t end = outliers.tile_indptr[tile + 1];
    for (uint32_t r = outliers.tile_indptr[tile]; r < end; r += 32) {
      LaneSlots mine = {};
      if (r + static_cast<uint32_t>(lane) < end) {
        mine = ReadRecord(records[r + static_cast<uint32_t>(lane)], ik * outliers.tile_k, unit_k0,
                          first_channel);
      }
      uint32_t sum = mine.counts.packed;  // of this lane and the lower ones
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
        if (lane >= distance) sum += other;
      }
      BlockCounts at = {before.packed + sum - mine.counts.packed};
      for (const uint32_t slot : mine.slots) {
        if (slot == 0) continue;
        const int block = BlockOfSlot(slot);
        visit(block, at.of(block), slot);
        at.packed += block == 0 ? 1u : 1u << 16;
      }
      before.packed += __shfl_sync(kAllLanes, sum, 31);
    }
  }
  return before;
}

__global__ void __launch_bounds__(32 * kUnitWarps)
    CountKernel(TileCooPointers outliers, PackedLayout layout, OutlierRef* index) {
  const int64_t id = int64_t{blockIdx.x} * kUnitWarps + threadIdx.x / 32;
  if (id >= int64_t{layout.num_strips} * layout.num_units) return;
  const BlockCounts counts =
      VisitSlots(outliers, layout.k, static_cast<int>(id / layout.num_units),
                 static_cast<int>(id % layout.num_units), [](int, int, uint32_t) {});
  if (threadIdx.x % 32 == 0) index[id].num_16bytes = RecordBytes(counts.total()) / 16;
}

// Running sum of the index by one block, which also finds the total and the maximum.
__global__ void __launch_bounds__(kScanThreads)
    ScanKernel(OutlierRef* index, int64_t count, ScratchHead* head) {
  __shared__ uint32_t warp_sums[32];
  __shared__ uint32_t most_of_all;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) most_of_all = 0;
  uint32_t total = 0;
  uint32_t most = 0;
  for (int64_t begin = 0; begin < count; begin += kScanThreads) {
    const int64_t i = begin + threadIdx.x;
    const uint32_t size = i < count ? index[i].num_16bytes : 0;
    most = max(most, size);
    const uint32_t aligned = AlignedRecord(size);
    uint32_t sum = aligned;
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
      if (lane >= distance) sum += other;
    }
    __syncthreads();  // the round before has read warp_sums
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    uint32_t before = total;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) before += warp_sums[w];
      total += warp_sums[w];
    }
    if (i < count) index[i].offset = before + sum - aligned;
  }
  atomicMax(&most_of_all, most);
  __syncthreads();
  if (threadIdx.x == 0) {
    head->total_16bytes = total;
    head->most_16bytes = most_of_all;
  }
}

// One piece in a warp's shared memory.
struct PieceBuffer {
  uint32_t slots[kMaxPieceSlots];  // position, value in the high half
  uint16_t sorted[kMaxPieceSlots];
  uint16_t order[kMaxPieceSlots];
  uint16_t class_begin[kBlocksPerStrip][kBankClasses + 1];
};

__device__ uint32_t SortKeyOf(uint32_t slot) { return SlotSortKey(slot & 0xffff); }

// Fills `sorted` and `order` for the block whose slots are [begin, end) of the piece.
__device__ void SortBlock(PieceBuffer& piece, int block, int begin, int end) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = begin + lane; i < end; i += 32) {
    const uint32_t key = SortKeyOf(piece.slots[i]);
    int rank = begin;
    for (int j = begin; j < end; ++j) {
      const uint32_t other = SortKeyOf(piece.slots[j]);
      rank += other < key || (other == key && j < i) ? 1 : 0;
    }
    piece.sorted[rank] = static_cast<uint16_t>(i);
  }
  if (lane <= kBankClasses) {
    int before = 0;
    for (int j = begin; j < end; ++j) {
      before += BankClass(piece.slots[j] & 0xffff) < lane ? 1 : 0;
    }
    piece.class_begin[block][lane] = static_cast<uint16_t>(before);
  }
}

__device__ void WritePiece(PieceBuffer& piece, int first, int slots, uint8_t* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  SortBlock(piece, 0, 0, first);
  SortBlock(piece, 1, first, slots);
  __syncwarp();
  if (lane < kBlocksPerStrip) {
    const int begin = lane == 0 ? 0 : first;
    OrderForBanks(begin, piece.class_begin[lane], piece.order + begin);
  }
  __syncwarp();
  const int quads = QuadsOf(slots);
  for (int quad = lane; quad <= quads; quad += 32) {
    uint32_t words[4] = {};
    if (quad == quads) words[0] = TrailerWord(first, slots);
    for (int s = 0; s < kSlotsPerQuad; ++s) {
      const int i = quad * kSlotsPerQuad + s;
      if (i >= slots) break;
      const int begin = i < first ? 0 : first;
      const uint32_t slot = piece.slots[piece.sorted[begin + piece.order[i]]];
      words[s / 2] |= (slot & 0xffff) << (16 * (s % 2));
      words[2 + s / 2] |= slot >> 16 << (16 * (s % 2));
    }
    reinterpret_cast<uint4*>(out)[quad] = {words[0], words[1], words[2], words[3]};
  }
  __syncwarp();  // before the buffer is filled again
}

__global__ void __launch_bounds__(32 * kUnitWarps)
    PackOutliersKernel(TileCooPointers outliers, PackedLayout layout, const OutlierRef* index,
                       uint8_t* records) {
  __shared__ PieceBuffer buffers[kUnitWarps];
  PieceBuffer& piece = buffers[threadIdx.x / 32];
  const int64_t id = int64_t{blockIdx.x} * kUnitWarps + threadIdx.x / 32;
  if (id >= int64_t{layout.num_strips} * layout.num_units) return;
  if (index[id].num_16bytes == 0) return;
  const int strip = static_cast<int>(id / layout.num_units);
  const int unit = static_cast<int>(id % layout.num_units);
  uint8_t* out = records + int64_t{index[id].offset} * 16;
  const BlockCounts counts = VisitSlots(outliers, layout.k, strip, unit, [](int, int, uint32_t) {});
  for (int begin = 0; begin < counts.total(); begin += kMaxPieceSlots) {
    const int size = min(counts.total() - begin, kMaxPieceSlots);
    VisitSlots(outliers, layout.k, strip, unit, [&](int block, int i, uint32_t slot) {
      const int at = (block == 0 ? 0 : counts.of(0)) + i - begin;
      if (at >= 0 && at < size) piece.slots[at] = slot;
    });
    __syncwarp();
    WritePiece(piece, max(0, min(counts.of(0) - begin, size)), size, out);
    out += kMaxPieceBytes;
  }
  const uint32_t end = index[id].offset + index[id].num_16bytes;
  const uint32_t next = index[id].offset + AlignedRecord(index[id].num_16bytes);
  for (uint32_t i = end + threadIdx.x % 32; i < next; i += 32) {
    reinterpret_cast<uint4*>(records)[i] = {};
  }
}

}  // namespace

int64_t DevicePackScratchBytes(const Int4Arrays& weight) {
  return static_cast<int64_t>(sizeof(ScratchHead)) +
         NumUnits(DenseLayout(weight)) * static_cast<int64_t>(sizeof(OutlierRef));
}

cudaError_t LayOutOnDevice(const Int4Arrays& weight, const TileCooPointers& outliers, void* scratch,
                           cudaStream_t stream, PackedLayout* layout) {
  *layout = DenseLayout(weight);
  const auto bytes = static_cast<size_t>(DevicePackScratchBytes(weight));
  cudaError_t error = cudaMemsetAsync(scratch, 0, bytes, stream);
  if (error != cudaSuccess || outliers.tile_indptr == nullptr) return error;
  CountKernel<<<UnitBlocks(*layout), 32 * kUnitWarps, 0, stream>>>(outliers, *layout,
                                                                   IndexOf(scratch));
  ScanKernel<<<1, kScanThreads, 0, stream>>>(IndexOf(scratch), NumUnits(*layout),
                                             static_cast<ScratchHead*>(scratch));
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  ScratchHead head = {};
  error = cudaMemcpyAsync(&head, scratch, sizeof(head), cudaMemcpyDeviceToHost, stream);
  if (error != cudaSuccess) return error;
  error = cudaStreamSynchronize(stream);
  layout->max_outlier_bytes = static_cast<int32_t>(head.most_16bytes * 16);
  layout->num_bytes = layout->outliers_offset + int64_t{head.total_16bytes} * 16;
  return error;
}

cudaError_t PackOnDevice(const Int4Arrays& weight, const TileCooPointers& outliers,
                         const PackedLayout& layout, const void* scratch, uint8_t* out,
                         cudaStream_t stream) {
  const int64_t units = NumUnits(layout);
  PackDenseKernel<<<static_cast<unsigned>(units * kUnitChunks), kDenseThreads, 0, stream>>>(
      weight, layout, out);
  const OutlierRef* index = IndexOf(const_cast<void*>(scratch));
  const auto index_bytes = static_cast<size_t>(units) * sizeof(OutlierRef);
  const auto gap = static_cast<size_t>(layout.outliers_offset - layout.index_offset) - index_bytes;
  cudaError_t error = cudaMemcpyAsync(out + layout.index_offset, index, index_bytes,
                                      cudaMemcpyDeviceToDevice, stream);
  if (error != cudaSuccess) return error;
  if (gap > 0) {
    error = cudaMemsetAsync(out + layout.index_offset + index_bytes, 0, gap, stream);
    if (error != cudaSuccess) return error;
  }
  if (layout.max_outlier_bytes > 0) {
    PackOutliersKernel<<<UnitBlocks(layout), 32 * kUnitWarps, 0, stream>>>(
        outliers, layout, index, out + layout.outliers_offset);
  }
  return cudaGetLastError();
}

}  // namespace flashquant::cuda
