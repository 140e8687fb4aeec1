// Tensor-core and shared-memory matrix instructions as device functions, one per PTX instruction.
// No layout decisions here: those are in linear_w4a16/packed_format.h.
#pragma once

#include <cstdint>

namespace flashquant::cuda {

// D = A * B + C with A 16 x 16 (row), B 16 x 8 (col), BF16 in, FP32 out. Lane (g, t) = (lane / 4,
// lane % 4) holds A (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8) and their right neighbours,
// B (2t, g), (2t + 8, g) and the elements below them, C and D (g, 2t), (g, 2t + 1), (g + 8, 2t),
// (g + 8, 2t + 1).
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// Four 8 x 8 matrices of 16-bit elements, transposed. Lane i gives the shared address of row i % 8
// of matrix i / 8 (16 bytes, 16-byte aligned).
__device__ __forceinline__ void LdMatrixX4Trans(uint32_t (&r)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

__device__ __forceinline__ void StoreShared4(uint32_t shared_address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address), "r"(v) : "memory");
}

// The counterpart of LdMatrixX4Trans: matrix i's column c goes to shared address base + the `row`
// of lane 8i + c.
__device__ __forceinline__ void StoreTransposedX4(uint32_t base, uint32_t row, int lane,
                                                  const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(base + row),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t column;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(r[i]));
    const uint32_t own = __shfl_sync(0xffffffffu, row, 8 * i + (lane >> 2));
    StoreShared4(base + own + (lane & 3) * 4, column);
  }
#endif
}

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Of global memory that another kernel may have written while this one had already begun: not
// through the read-only path.
__device__ __forceinline__ uint4 LoadGlobal16(const void* address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 LoadShared16(uint32_t shared_address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 LoadShared8(uint32_t shared_address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "r"(shared_address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t LoadShared2(uint32_t shared_address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared_address) : "memory");
  return v;
}

// Loads that the assembler does not move behind a branch to where they are used first.
__device__ __forceinline__ uint4 LoadSharedEarly16(uint32_t shared_address) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address)
               : "memory");
  return v;
}
__device__ __forceinline__ uint32_t LoadSharedEarly2(uint32_t shared_address) {
  uint16_t v;
  asm volatile("ld.volatile.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared_address) : "memory");
  return v;
}

__device__ __forceinline__ void StoreShared16(uint32_t shared_address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared_address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint32_t LoadShared4(uint32_t shared_address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address) : "memory");
  return v;
}

// The two BF16 numbers of a word as FP32, exactly.
__device__ __forceinline__ float LowBf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighBf16(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

}  // namespace flashquant::cuda
