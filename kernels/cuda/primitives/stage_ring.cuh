// A ring of shared-memory stages that one warp fills for itself from global memory, each stage in
// two copies. Two forms with the same functions: bulk copies that complete on an mbarrier (sm_90
// and later; one lane issues them, they cost the others nothing) and cp.async groups (sm_80 and
// later). No block-wide barrier is involved in either, so warps of a block run independently.
#pragma once

#include <cstdint>

namespace flashquant::cuda {

// Filling: CopyBoth, or CopyFirst then CopyRest, for each stage in the order 0, 1, ..., stages - 1,
// 0, ...; where nothing is left to copy, CopyNothing instead, so that the number of fills is the
// same on all paths. At the start CopyFirst of several stages may go before their CopyRest. All
// lanes call all functions, and have passed a __syncwarp behind the last read of what was in the
// stage.
template <bool kBulk>
class StageRing;

// Code for older devices holds this form without its instructions; the launcher never picks it
// there.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FQ_BULK_COPY_ASM(...) asm volatile(__VA_ARGS__)
#else
#define FQ_BULK_COPY_ASM(...) (void)0
#endif

template <>
class StageRing<true> {
 public:
  // `base`: shared address of the first stage, 16-byte aligned; `barriers`: shared address of
  // `stages` 8-byte words of this warp. At most 32 stages.
  __device__ StageRing(uint32_t base, uint32_t barriers, int stages, uint32_t stage_bytes, int lane)
      : base_(base), barriers_(barriers), stage_bytes_(stage_bytes), lane_(lane) {
    if (lane == 0) {
      for (int i = 0; i < stages; ++i) {
        FQ_BULK_COPY_ASM("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i)
                         : "memory");
      }
      FQ_BULK_COPY_ASM("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
  }

  // `bytes` is a multiple of 16 and may be 0.
  __device__ void CopyFirst(int stage, const uint8_t* source, uint32_t bytes) {
    if (lane_ != 0 || bytes == 0) return;
    FQ_BULK_COPY_ASM(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(Barrier(stage)), "r"(bytes)
        : "memory");
    Copy(stage, 0, source, bytes);
  }
  // `offset`: in the stage.
  __device__ void CopyRest(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes) {
    if (lane_ != 0) return;
    FQ_BULK_COPY_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Barrier(stage)),
                     "r"(bytes)
                     : "memory");
    if (bytes != 0) Copy(stage, offset, source, bytes);
  }
  // `bytes` not 0.
  __device__ void CopyBoth(int stage, const uint8_t* source, uint32_t bytes,
                           const uint8_t* rest_source, uint32_t rest_bytes) {
    if (lane_ != 0) return;
    FQ_BULK_COPY_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Barrier(stage)),
                     "r"(bytes + rest_bytes)
                     : "memory");
    Copy(stage, 0, source, bytes);
    if (rest_bytes != 0) Copy(stage, bytes, rest_source, rest_bytes);
  }
  __device__ void CopyNothing() {}

  __device__ uint32_t Address(int stage) const { return base_ + stage * stage_bytes_; }

  // Returns when the next fill of `stage` is there.
  __device__ void Wait(int stage) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    uint32_t done = 0;
#else
    uint32_t done = 1;
#endif
    while (done == 0) {
      FQ_BULK_COPY_ASM(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, "
          "0, p; }"
          : "=r"(done)
          : "r"(Barrier(stage)), "r"(parities_ >> stage & 1)
          : "memory");
    }
    parities_ ^= 1u << stage;
  }
  // The same, for a fill out of the order.
  __device__ void WaitForAll(int stage) { Wait(stage); }

 private:
  __device__ uint32_t Barrier(int stage) const { return barriers_ + 8 * stage; }
  __device__ void Copy(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes) {
    FQ_BULK_COPY_ASM(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(Address(stage) + offset),
        "l"(source), "r"(bytes), "r"(Barrier(stage)), "l"(kReadOnce)
        : "memory");
  }

  // What createpolicy.fractional.L2::evict_first with fraction 1 gives, as a constant.
  static constexpr uint64_t kReadOnce = 0x12f0000000000000;

  uint32_t base_;
  uint32_t barriers_;
  uint32_t stage_bytes_;
  int lane_;
  uint32_t parities_ = 0;  // bit i: of stage i's next phase
};

#undef FQ_BULK_COPY_ASM

template <>
class StageRing<false> {
 public:
  // At most 6 stages.
  __device__ StageRing(uint32_t base, uint32_t /*barriers*/, int stages, uint32_t stage_bytes,
                       int lane)
      : base_(base), stages_(stages), stage_bytes_(stage_bytes), lane_(lane) {}

  __device__ void CopyFirst(int stage, const uint8_t* source, uint32_t bytes) {
    Copy(Address(stage), source, bytes);
  }
  __device__ void CopyRest(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes) {
    Copy(Address(stage) + offset, source, bytes);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ void CopyBoth(int stage, const uint8_t* source, uint32_t bytes,
                           const uint8_t* rest_source, uint32_t rest_bytes) {
    CopyFirst(stage, source, bytes);
    CopyRest(stage, bytes, rest_source, rest_bytes);
  }
  // An empty group, so that "all but the newest n groups" keeps its meaning at the end.
  __device__ void CopyNothing() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  __device__ uint32_t Address(int stage) const { return base_ + stage * stage_bytes_; }

  __device__ void Wait(int /*stage*/) {
    WaitForAllBut(stages_ - 1);
    __syncwarp();
  }
  __device__ void WaitForAll(int /*stage*/) {
    WaitForAllBut(0);
    __syncwarp();
  }

 private:
  __device__ void Copy(uint32_t to, const uint8_t* source, uint32_t bytes) {
    for (uint32_t i = lane_ * 16; i < bytes; i += 512) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(source + i)
                   : "memory");
    }
  }
  __device__ static void WaitForAllBut(int groups) {
    switch (groups) {
      case 0:
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        break;
      case 1:
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        break;
      case 2:
        asm volatile("cp.async.wait_group 2;" ::: "memory");
        break;
      case 3:
        asm volatile("cp.async.wait_group 3;" ::: "memory");
        break;
      case 4:
        asm volatile("cp.async.wait_group 4;" ::: "memory");
        break;
      default:
        asm volatile("cp.async.wait_group 5;" ::: "memory");
        break;
    }
  }

  uint32_t base_;
  int stages_;
  uint32_t stage_bytes_;
  int lane_;
};

// Programmatic dependent launch: what follows Wait may read what the kernel before wrote; Release
// lets the next kernel's blocks start (their own Wait still waits for the end of this one). Both do
// nothing when the launch did not ask for it.
__device__ __forceinline__ void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void ReleaseNextKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashquant::cuda
