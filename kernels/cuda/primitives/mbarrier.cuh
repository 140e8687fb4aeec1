// Barriers in shared memory (sm_90 and later) for producers and consumers in one block: 8 bytes
// each, 8-byte aligned, named by their shared address. A phase is complete when all arrivals that
// InitBarrier named have come, and all bytes that were announced.
#pragma once

#include <cstdint>

namespace flashquant::cuda {

// By one thread, before a __syncthreads.
__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Between this thread's reads and writes of shared memory and those of copies and warpgroup MMAs
// that are started behind the next barrier.
__device__ __forceinline__ void FenceProxies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same, and `bytes` will come by BulkCopy.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Returns when the phase of this parity is complete; the first phase has parity 0, and before it
// parity 1 counts as complete.
__device__ __forceinline__ void WaitForPhase(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
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
  constexpr uint64_t kReadOnce = 0x12f0000000000000;
  asm volatile(
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
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// A place in a ring of stages, and the parity of the phase in which the stage is filled.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// How many registers a thread of this warpgroup has from here on, a multiple of 8; all its warps
// call it. More are there when other warpgroups have given theirs up.
template <int kRegisters>
__device__ __forceinline__ void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GiveUpRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashquant::cuda
