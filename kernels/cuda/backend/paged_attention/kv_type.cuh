// The two types of KV cache as the attention sees them: Bf16Kv and Fp8Kv. Each says what an element
// is, how it is made from BF16, and how tensor-core fragments come out of the shared-memory rows of
// keys and values, which hold the cache's own bytes.
//
// FP8 codes become FP16 numbers in registers, exactly, and are multiplied as such; query and
// weights are then FP16 too (a query beyond 65504 becomes infinite, and its row is found not to be
// finite). A 16-bit element of ldmatrix is two codes, so a fragment holds other dimensions than a
// BF16 one does: of a block of 16, the pair of lanes' columns that BF16 has as 2t, 2t + 1 and 2t +
// 8, 2t + 9 is 4t .. 4t + 3. Queries are stored in that order, and sums come out in the order of
// DimOf.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/cuda/backend/paged_attention/fp8_pair.h"
#include "kernels/cuda/primitives/mma.cuh"

namespace flashquant::cuda {

__device__ __forceinline__ void LdMatrixX4(uint32_t (&r)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

struct Bf16Kv {
  using Element = __nv_bfloat16;
  static constexpr bool kScaled = false;
  static constexpr int kBlocks = 1;  // blocks of 16 dimensions of one ldmatrix over 16 keys

  __device__ static Element FromBf16(__nv_bfloat16 x, float /*inverse_scale*/) { return x; }
  // Scores and averages are as they should be.
  __device__ static float ReadFactor() { return 1.0f; }

  __device__ static int QueryPlace(int dim) { return dim; }
  __device__ static uint16_t QueryBits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
  // As the tensor core will see it.
  __device__ static float RoundWeight(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
  __device__ static uint32_t WeightPair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }

  // b[block]: of keys 0 to 7 two registers, then of keys 8 to 15.
  __device__ static void LoadKeys(uint32_t address, uint32_t (&b)[kBlocks][4]) {
    LdMatrixX4(b[0], address);
  }
  // b[block]: two registers of each of the block's two tiles of eight dimensions.
  __device__ static void LoadValues(uint32_t address, uint32_t (&b)[kBlocks][4]) {
    LdMatrixX4Trans(b[0], address);
  }
  __device__ static void Mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MmaBf16(sums, a, b0, b1, sums);
  }

  // The pair `pair` of a lane's sums of row r (0 or 1): two neighbouring dimensions, from DimOf on.
  template <int kTiles>
  __device__ static float2 SumPair(const float (&sums)[kTiles][4], int pair, int r) {
    return {sums[pair][2 * r], sums[pair][2 * r + 1]};
  }
  __device__ static int DimOf(int pair, int lane) { return pair * 8 + lane % 4 * 2; }
};

struct Fp8Kv {
  using Element = uint8_t;
  static constexpr bool kScaled = true;
  static constexpr int kBlocks = 2;

  // Rounded to nearest even and clamped; what is not finite becomes NaN (kernels/base/float8.h).
  __device__ static Element FromBf16(__nv_bfloat16 x, float inverse_scale) {
    const float scaled = __bfloat162float(x) * inverse_scale;
    if (!isfinite(scaled)) return 0x7f;
    return __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
  }
  // What products with codes are multiplied by, besides the scale.
  __device__ static float ReadFactor() {
#if __CUDA_ARCH__ >= 890
    return 1.0f;
#else
    return kFp8HalfFactor;
#endif
  }

  __device__ static int QueryPlace(int dim) {
    return dim / 16 * 16 + dim / 2 % 2 * 8 + dim % 16 / 4 * 2 + dim % 2;
  }
  __device__ static uint16_t QueryBits(__nv_bfloat16 x) {
    return __half_as_ushort(__float2half_rn(__bfloat162float(x)));
  }
  __device__ static float RoundWeight(float x) { return __half2float(__float2half_rn(x)); }
  __device__ static uint32_t WeightPair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }

  // Codes 0 and 1 (2 and 3) of a register as FP16 numbers.
  struct Halves {
    uint32_t low;
    uint32_t high;
    __device__ explicit Halves(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
      asm("{ .reg .b16 x, y; mov.b32 {x, y}, %2; cvt.rn.f16x2.e4m3x2 %0, x; "
          "cvt.rn.f16x2.e4m3x2 %1, y; }"
          : "=r"(low), "=r"(high)
          : "r"(codes));
#else
      low = HalvesFromFp8(__byte_perm(codes, 0, 0x1404));
      high = HalvesFromFp8(__byte_perm(codes, 0, 0x3424));
#endif
    }
  };

  __device__ static void LoadKeys(uint32_t address, uint32_t (&b)[kBlocks][4]) {
    uint32_t codes[4];
    LdMatrixX4(codes, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Halves halves(codes[i]);
      b[i % 2][i / 2 * 2] = halves.low;
      b[i % 2][i / 2 * 2 + 1] = halves.high;
    }
  }
  // A transposed register has two dimensions of one key, then of the next: they are swapped to two
  // keys of the even dimension, then of the odd one, which go to the two tiles.
  __device__ static void LoadValues(uint32_t address, uint32_t (&b)[kBlocks][4]) {
    uint32_t codes[4];
    LdMatrixX4Trans(codes, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Halves halves(__byte_perm(codes[i], 0, 0x3120));
      b[i / 2][i % 2] = halves.low;
      b[i / 2][i % 2 + 2] = halves.high;
    }
  }
  __device__ static void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }

  template <int kTiles>
  __device__ static float2 SumPair(const float (&sums)[kTiles][4], int pair, int r) {
    const int tile = pair / 2 * 2;
    return {sums[tile][2 * r + pair % 2], sums[tile + 1][2 * r + pair % 2]};
  }
  __device__ static int DimOf(int pair, int lane) {
    return pair / 2 * 16 + lane % 4 * 4 + pair % 2 * 2;
  }
};

}  // namespace flashquant::cuda
