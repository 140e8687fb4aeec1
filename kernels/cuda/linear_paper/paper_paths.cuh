// What the warps of the paper's kernel do with a tile in shared memory: dense warps multiply codes
// on tensor cores, the others outliers on CUDA cores as in the paper's listing 1. Deviations from
// the listing, without which it is not right (design "kernel" 9): sums in FP32, added to shared C
// instead of stored, values behind the indices, nothing read for an empty bucket; more than eight
// batch rows by more x values for each outlier.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/linear_paper/paper_format.h"
#include "kernels/cuda/primitives/host_device.h"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

inline constexpr int kPaperMaxStages = 4;
inline constexpr int kPaperMaxThreads = (kPaperDenseWarps + kPaperSparseWarps) * 32;
inline constexpr int kPaperXRowBytes = kPaperTileK * 2;

struct PaperKernelArgs {
  const __nv_bfloat16* x;
  __nv_bfloat16* y;
  int64_t x_stride;
  int64_t y_stride;
  int32_t m;  // at most 8 * kBatchBlocks
  int32_t k;
  int32_t n;
  int32_t tiles_k;
  EvenSplit tiles;  // over blocks
  const uint8_t* dense;
  const uint32_t* indptr;  // nullptr: no outliers
  const uint8_t* buckets;
  const uint8_t* records;
  int32_t tile_dense_bytes;
  int32_t groups_per_tile;
  int32_t buckets_per_tile;
  int32_t staged_records;  // of a tile; those beyond stay in global memory
  bool all_staged;
  bool extra_warps;
  float* workspace;
  uint32_t* counters;
  // Of a stage; x, dense, buckets and records follow each other in it.
  int32_t dense_offset;
  int32_t buckets_offset;
  int32_t records_offset;
  int32_t stage_bytes;
  int32_t stages;
};

// FP32 sums of an output tile: [batch block][channel][8].
template <int kBatchBlocks>
inline constexpr int kPaperSums = kBatchBlocks* kPaperTileN * 8;

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void LdMatrixX4(uint32_t (&r)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

// ---- Dense warps ----

template <int kBatchBlocks>
using PaperAccumulators = float[4][kBatchBlocks][4];  // [m16 block of the strip]

// Register r of the A fragment in a word of codes: q less its zero point in BF16, exactly.
// `biases`: 128 + z of channels g and g + 8, each twice.
__device__ __forceinline__ uint32_t DequantPair(uint32_t word, int r, const uint32_t (&biases)[2]) {
  const uint32_t biased = (word >> (4 * r) & 0x000f000f) | 0x43004300;  // 128 + q
  const __nv_bfloat162 value = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&biased),
                                       *reinterpret_cast<const __nv_bfloat162*>(&biases[r % 2]));
  return *reinterpret_cast<const uint32_t*>(&value);
}

// Adds the warp's 64 channels x 64 features of the tile in `stage` to `acc`; group scales multiply
// the sums, not the weights.
template <int kBatchBlocks, bool kZeros>
__device__ __forceinline__ void AddDenseTile(const PaperKernelArgs& args, uint32_t stage, int warp,
                                             int lane, PaperAccumulators<kBatchBlocks>& acc) {
  const int strip = warp % 2;
  const int first_step = warp / 2 * 4;  // of k16 steps
  const uint32_t dense = stage + args.dense_offset;
  const uint32_t codes = dense + (strip * (kPaperTileK / 16) + first_step) * 512 + lane * 16;
  const uint32_t scales = dense + kPaperCodeBytes + (strip * kPaperStripN + lane / 4) * 2;
  const int steps_per_group = kPaperTileK / 16 / args.groups_per_tile;
  float part[4][kBatchBlocks][4] = {};
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int step = first_step + 2 * pair;
    const uint32_t group = scales + step / steps_per_group * (kPaperTileN * 2);
    uint32_t b[kBatchBlocks][4];
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
      LdMatrixX4(b[nb], stage + (nb * 8 + lane % 8) * kPaperXRowBytes +
                            ((2 * step + lane / 8) ^ (lane % 8)) * 16);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = LoadShared16(codes + (2 * pair + half) * 512);
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        uint32_t biases[2] = {0x43084308, 0x43084308};
        if (kZeros) {
          const uint32_t zeros = group + args.groups_per_tile * (kPaperTileN * 2) + block * 32;
          biases[0] = LoadShared2(zeros) * 0x00010001u;
          biases[1] = LoadShared2(zeros + 16) * 0x00010001u;
        }
        uint32_t a[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = DequantPair(word[block], r, biases);
#pragma unroll
        for (int nb = 0; nb < kBatchBlocks; ++nb) {
          MmaBf16(part[block][nb], a, b[nb][2 * half], b[nb][2 * half + 1], part[block][nb]);
        }
      }
    }
    if (pair == 0 && steps_per_group > 2) continue;  // the group goes on
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const float low = LowBf16(LoadShared2(group + block * 32));
      const float high = LowBf16(LoadShared2(group + block * 32 + 16));
#pragma unroll
      for (int nb = 0; nb < kBatchBlocks; ++nb) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[block][nb][i] += (i < 2 ? low : high) * part[block][nb][i];
          part[block][nb][i] = 0.0f;
        }
      }
    }
  }
}

// Adds a warp's sums of its strip to the tile's.
template <int kBatchBlocks>
__device__ __forceinline__ void AddToSums(float* sums, int warp, int lane,
                                          PaperAccumulators<kBatchBlocks>& acc) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
#pragma unroll
    for (int nb = 0; nb < kBatchBlocks; ++nb) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = warp % 2 * kPaperStripN + block * 16 + lane / 4 + i / 2 * 8;
        sums[(nb * kPaperTileN + channel) * 8 + lane % 4 * 2 + i % 2] += acc[block][nb][i];
        acc[block][nb][i] = 0.0f;
      }
    }
  }
}

// ---- Outliers: listing 1 ----

__device__ __forceinline__ uint4 ReadRecord(const PaperKernelArgs& args, uint32_t staged,
                                            uint32_t first_of_tile, int index) {
  if (index < args.staged_records) return LoadShared16(staged + index * 16);
  return reinterpret_cast<const uint4*>(args.records)[first_of_tile + index];
}

// The buckets that begin with `sub_warp`, `num_sub_warps` apart: lane % 8 is the batch row. A
// column is in one bucket, so that no two lanes add to one sum.
template <int kBatchBlocks>
__device__ __forceinline__ void AddOutlierTile(const PaperKernelArgs& args, uint32_t stage,
                                               int tile, int sub_warp, int num_sub_warps, int lane,
                                               float* sums) {
  const int row = lane % 8;
  const uint32_t x_row = stage + row * kPaperXRowBytes;
  const uint32_t swizzle = row * 0x08080808u;  // on four row indices at once
  const uint32_t staged = stage + args.records_offset;
  const uint32_t first_of_tile = args.all_staged ? 0 : args.indptr[tile];
  for (int bucket = sub_warp; bucket < args.buckets_per_tile; bucket += num_sub_warps) {
    const uint32_t info = LoadShared4(stage + args.buckets_offset + bucket * 4);
    const int begin = static_cast<int>(info & 0xffff);
    const int end = begin + static_cast<int>(info >> 16);
    uint4 next = {};
    if (begin < end) next = ReadRecord(args, staged, first_of_tile, begin);
    for (int i = begin; i < end; ++i) {
      const uint4 record = next;
      if (i + 1 < end) next = ReadRecord(args, staged, first_of_tile, i + 1);
      const uint32_t ks = record.x ^ swizzle;
      const float values[4] = {LowBf16(record.z), HighBf16(record.z), LowBf16(record.w),
                               HighBf16(record.w)};
#pragma unroll
      for (int nb = 0; nb < kBatchBlocks; ++nb) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const uint32_t k = ks >> (8 * s) & 0xff;
          const uint32_t x = LoadShared2(x_row + nb * 8 * kPaperXRowBytes + k * 2);
          sum += LowBf16(x) * values[s];
        }
        sums[(nb * kPaperTileN + (record.y & 0xff)) * 8 + row] += sum;
      }
    }
  }
}

}  // namespace flashquant::cuda
