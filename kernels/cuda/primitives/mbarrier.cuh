// Barriers in shared memory (sm_90 and later) and the copies and stores that complete on them: 8
// bytes each, 8-byte aligned, named by their shared address. A phase is complete when all arrivals
// that InitBarrier named have come, and all bytes that were announced, in either order.
// Code for older devices holds these functions without their instructions; no launcher picks it
// there.
#pragma once

#include <cstdint>

namespace flashquant::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FQ_SM90_ASM(...) asm volatile(__VA_ARGS__)
inline constexpr bool kHasMbarriers = true;
#else
#define FQ_SM90_ASM(...) (void)0
inline constexpr bool kHasMbarriers = false;
#endif

// True in one lane of a whole warp. The compiler knows that it is one, and leaves out the loop over
// lanes that it makes around a bulk copy under any other condition.
__device__ __forceinline__ bool ElectLane() {
  uint32_t elected = 0;
  FQ_SM90_ASM("{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mov.u32 %0, 1; }" : "+r"(elected));
  return elected != 0;
}

// By one thread; others see it behind FenceProxies and a barrier of the block.
__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  FQ_SM90_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Between this thread's reads and writes of shared memory and those of copies and warpgroup MMAs
// that are started behind the next barrier.
__device__ __forceinline__ void FenceProxies() {
  FQ_SM90_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void Arrive(uint32_t barrier) {
  FQ_SM90_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same, and `bytes` more will come.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  FQ_SM90_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
              : "memory");
}
// `bytes` more will come in this phase.
__device__ __forceinline__ void ExpectMore(uint32_t barrier, uint32_t bytes) {
  FQ_SM90_ASM("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
              : "memory");
}
// Returns when the phase of this parity is complete; the first phase has parity 0, and before it
// parity 1 counts as complete.
__device__ __forceinline__ void WaitForPhase(uint32_t barrier, uint32_t parity) {
  uint32_t done = kHasMbarriers ? 0 : 1;
  while (done == 0) {
    FQ_SM90_ASM(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Starts a copy of `bytes` (a multiple of 16, not 0) that will be read once, both ends 16-byte
// aligned.
__device__ __forceinline__ void BulkCopy(uint32_t to, const uint8_t* from, uint32_t bytes,
                                         uint32_t barrier) {
  // What createpolicy.fractional.L2::evict_first with fraction 1 gives, as a constant.
  [[maybe_unused]] constexpr uint64_t kReadOnce = 0x12f0000000000000;
  FQ_SM90_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(kReadOnce)
      : "memory");
}

// Starts a copy of a box of a matrix, from element (column, row) on; what is outside comes as
// zeros. `map`: a CUtensorMap in a kernel's parameters.
__device__ __forceinline__ void BoxCopy(uint32_t to, const void* map, int column, int row,
                                        uint32_t barrier) {
  FQ_SM90_ASM(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

#undef FQ_SM90_ASM

}  // namespace flashquant::cuda
