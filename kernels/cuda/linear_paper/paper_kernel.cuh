// The kernel of the paper's own mapping. Blocks are persistent and take even ranges of tiles, K
// fastest (Stream-K); all warps bring tiles of x, codes and outliers into a ring of stages. Eight
// dense warps have two strips of 64 channels x four slices of K (sliced K); outliers go to extra
// warps or, without these, to the dense warps after their codes. Sums of outliers are kept in
// shared memory, where the dense sums join them at the end of a column of tiles.
// Source: paper sections on sparse-dense tiling and pipelining.
#pragma once

#include "kernels/cuda/linear_paper/paper_paths.cuh"
#include "kernels/cuda/primitives/cp_async.cuh"

namespace flashquant::cuda {

__device__ __forceinline__ void CopyRange(uint32_t to, const uint8_t* from, int bytes) {
  for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes;
       i += static_cast<int>(blockDim.x) * 16) {
    CopyAsync16(to + i, from + i);
  }
}

// Brings tiles into stages, in order. The end of a tile's records is read one tile ahead.
template <int kBatchBlocks>
class TileLoader {
 public:
  __device__ TileLoader(const PaperKernelArgs& args, uint32_t ring, int first_tile)
      : args_(args), ring_(ring), tile_(first_tile) {
    if (args.indptr == nullptr) return;
    begin_ = args.indptr[tile_];
    end_ = args.indptr[tile_ + 1];
  }

  // `more`: another tile follows.
  __device__ void Fill(int stage, bool more) {
    const uint32_t to = ring_ + stage * args_.stage_bytes;
    CopyX(to);
    CopyRange(to + args_.dense_offset, args_.dense + int64_t{tile_} * args_.tile_dense_bytes,
              args_.tile_dense_bytes);
    if (args_.indptr != nullptr) {
      const int bucket_bytes = args_.buckets_per_tile * 4;
      CopyRange(to + args_.buckets_offset, args_.buckets + int64_t{tile_} * bucket_bytes,
                bucket_bytes);
      const int records = min(static_cast<int>(end_ - begin_), args_.staged_records);
      CopyRange(to + args_.records_offset, args_.records + int64_t{begin_} * 16, records * 16);
      begin_ = end_;
      if (more) end_ = args_.indptr[tile_ + 2];
    }
    ++tile_;
  }

 private:
  // Row-major, 16-byte pieces of a row exchanged by its number: zeros beyond m and k.
  __device__ void CopyX(uint32_t to) const {
    const int k0 = tile_ % args_.tiles_k * kPaperTileK;
    constexpr int kPieces = kPaperTileK / 8;
    for (int i = threadIdx.x; i < kBatchBlocks * 8 * kPieces; i += blockDim.x) {
      const int row = i / kPieces;
      const int piece = i % kPieces;
      const bool inside = row < args_.m && k0 + piece * 8 < args_.k;
      const __nv_bfloat16* from =
          inside ? args_.x + row * args_.x_stride + k0 + piece * 8 : args_.x;
      CopyAsync16(to + row * kPaperXRowBytes + (piece ^ row % 8) * 16, from, inside ? 16 : 0);
    }
  }

  const PaperKernelArgs& args_;
  const uint32_t ring_;
  int tile_;
  uint32_t begin_ = 0;
  uint32_t end_ = 0;
};

// ---- The end of a column of tiles ----

// The blocks whose ranges touch column `column` of tiles.
struct Contributors {
  int first;
  int last;

  __device__ Contributors(const PaperKernelArgs& args, int column) {
    first = BlockOfTile(args.tiles, column * args.tiles_k);
    last = BlockOfTile(args.tiles, (column + 1) * args.tiles_k - 1);
  }

 private:
  __device__ static int BlockOfTile(const EvenSplit& tiles, int tile) {
    const int in_longer = tiles.remainder * (tiles.quotient + 1);
    return tile < in_longer ? tile / (tiles.quotient + 1)
                            : tiles.remainder + (tile - in_longer) / tiles.quotient;
  }
};

// A block has at most two columns that it shares: the one it begins in and the one it ends in.
template <int kBatchBlocks>
__device__ __forceinline__ float* PartialSums(const PaperKernelArgs& args, int block, int column) {
  const int slot = 2 * block + (args.tiles.Begin(block) < column * args.tiles_k ? 1 : 0);
  return args.workspace + int64_t{slot} * kPaperSums<kBatchBlocks>;
}

// Leaves the block's sums of a shared column in the workspace. True in the block that comes last:
// its `sums` are then those of all blocks, added in their order.
template <int kBatchBlocks>
__device__ __forceinline__ bool JoinBlocks(const PaperKernelArgs& args, int column, float* sums) {
  __shared__ bool is_last;
  const Contributors contributors(args, column);
  if (contributors.first == contributors.last) return true;
  float* const own = PartialSums<kBatchBlocks>(args, static_cast<int>(blockIdx.x), column);
  for (int i = threadIdx.x; i < kPaperSums<kBatchBlocks>; i += blockDim.x) __stcg(own + i, sums[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto others = static_cast<uint32_t>(contributors.last - contributors.first);
    is_last = atomicAdd(args.counters + column, 1u) == others;
    if (is_last) args.counters[column] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return false;
  for (int i = threadIdx.x; i < kPaperSums<kBatchBlocks>; i += blockDim.x) {
    float sum = 0.0f;
    for (int block = contributors.first; block <= contributors.last; ++block) {
      sum += __ldcg(PartialSums<kBatchBlocks>(args, block, column) + i);
    }
    sums[i] = sum;
  }
  __syncthreads();
  return true;
}

template <int kBatchBlocks>
__device__ __forceinline__ void FinishColumn(const PaperKernelArgs& args, int column, int warp,
                                             int lane, float* sums,
                                             PaperAccumulators<kBatchBlocks>& acc) {
  __syncthreads();
  for (int slice = 0; slice < kPaperDenseWarps / 2; ++slice) {
    if (warp / 2 == slice) AddToSums<kBatchBlocks>(sums, warp, lane, acc);
    __syncthreads();
  }
  if (JoinBlocks<kBatchBlocks>(args, column, sums)) {
    for (int i = threadIdx.x; i < kBatchBlocks * 8 * kPaperTileN; i += blockDim.x) {
      const int row = i / kPaperTileN;
      const int channel = i % kPaperTileN;
      const int n = column * kPaperTileN + channel;
      if (row >= args.m || n >= args.n) continue;
      args.y[row * args.y_stride + n] =
          __float2bfloat16_rn(sums[(row / 8 * kPaperTileN + channel) * 8 + row % 8]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kPaperSums<kBatchBlocks>; i += blockDim.x) sums[i] = 0.0f;
}

// Grid: args.tiles' parts. Shared memory: the sums, then the ring.
template <int kBatchBlocks, bool kZeros>
__global__ void __launch_bounds__(kPaperMaxThreads, 1)
    PaperLinearKernel(const __grid_constant__ PaperKernelArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  float* const sums = reinterpret_cast<float*>(shared);
  const uint32_t ring = SharedAddress(shared) + kPaperSums<kBatchBlocks> * 4;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_tile = args.tiles.Begin(static_cast<int>(blockIdx.x));
  const int num_tiles = args.tiles.Size(static_cast<int>(blockIdx.x));
  const int first_sparse_warp = args.extra_warps ? kPaperDenseWarps : 0;
  const int num_sub_warps =
      (static_cast<int>(blockDim.x) / 32 - first_sparse_warp) * kPaperBucketsPerWarp;
  PaperAccumulators<kBatchBlocks> acc = {};
  for (int i = threadIdx.x; i < kPaperSums<kBatchBlocks>; i += blockDim.x) sums[i] = 0.0f;

  TileLoader<kBatchBlocks> loader(args, ring, first_tile);
  for (int i = 0; i < args.stages - 1; ++i) {
    if (i < num_tiles) loader.Fill(i, i + 1 < num_tiles);
    CommitCopies();
  }
  for (int i = 0; i < num_tiles; ++i) {
    WaitForCopiesAllBut(args.stages - 2);
    __syncthreads();
    const int ahead = i + args.stages - 1;
    if (ahead < num_tiles) loader.Fill(ahead % args.stages, ahead + 1 < num_tiles);
    CommitCopies();
    const uint32_t stage = ring + i % args.stages * args.stage_bytes;
    const int tile = first_tile + i;
    if (warp < kPaperDenseWarps) AddDenseTile<kBatchBlocks, kZeros>(args, stage, warp, lane, acc);
    if (args.indptr != nullptr && warp >= first_sparse_warp) {
      AddOutlierTile<kBatchBlocks>(args, stage, tile,
                                   (warp - first_sparse_warp) * kPaperBucketsPerWarp + lane / 8,
                                   num_sub_warps, lane, sums);
    }
    if ((tile + 1) % args.tiles_k == 0 || i + 1 == num_tiles) {
      FinishColumn<kBatchBlocks>(args, tile / args.tiles_k, warp, lane, sums, acc);
    }
  }
}

}  // namespace flashquant::cuda
