// A ring of shared-memory stages that one warp fills for itself from global memory. Two forms with
// the same functions: bulk copies that complete on an mbarrier (sm_90 and later; one lane issues
// them, they cost the others nothing) and cp.async groups (sm_80 and later). No block-wide barrier
// is involved in either, so warps of a block run independently.
#pragma once

#include <cstdint>

namespace flashquant::cuda {

inline constexpr int kMaxStages = 4;

// Stages are filled in the order 0, 1, ..., stages - 1, 0, ...: item i is in stage i % stages.
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
  // kMaxStages 8-byte words of this warp. All lanes call it.
  __device__ StageRing(uint32_t base, uint32_t barriers, int stages, uint32_t stage_bytes, int lane)
      : base_(base), barriers_(barriers), stages_(stages), stage_bytes_(stage_bytes), lane_(lane) {
    if (lane == 0) {
      for (int i = 0; i < stages; ++i) {
        FQ_BULK_COPY_ASM("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i)
                         : "memory");
      }
      FQ_BULK_COPY_ASM("fence.proxy.async.shared::cta;" ::: "memory");
      FQ_BULK_COPY_ASM("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
    }
    __syncwarp();
  }

  // Starts the copy of the next item (`bytes` a multiple of 16, at most the stage). All lanes call
  // it, after a __syncwarp behind the last read of the item that was in that stage.
  __device__ void Fill(const uint8_t* source, uint32_t bytes) {
    if (lane_ == 0) {
      const uint32_t barrier = barriers_ + 8 * fill_stage_;
      FQ_BULK_COPY_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                       "r"(bytes)
                       : "memory");
      FQ_BULK_COPY_ASM(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(base_ + fill_stage_ * stage_bytes_),
          "l"(source), "r"(bytes), "r"(barrier), "l"(policy_)
          : "memory");
    }
    fill_stage_ = fill_stage_ + 1 == stages_ ? 0 : fill_stage_ + 1;
  }
  // Keeps the number of fills equal on all paths when there is nothing left to copy.
  __device__ void FillNothing() {}

  // Shared address of the next item, once it has arrived.
  __device__ uint32_t Wait() {
    const uint32_t barrier = barriers_ + 8 * stage_;
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
          : "r"(barrier), "r"(parity_)
          : "memory");
    }
    return base_ + stage_ * stage_bytes_;
  }
  // Moves on to the next item; the stage may be filled again after it.
  __device__ void Advance() {
    if (++stage_ == stages_) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  uint32_t base_;
  uint32_t barriers_;
  int stages_;
  uint32_t stage_bytes_;
  int lane_;
  int fill_stage_ = 0;
  int stage_ = 0;
  uint32_t parity_ = 0;
  uint64_t policy_ = 0;
};

#undef FQ_BULK_COPY_ASM

template <>
class StageRing<false> {
 public:
  __device__ StageRing(uint32_t base, uint32_t /*barriers*/, int stages, uint32_t stage_bytes,
                       int lane)
      : base_(base), stages_(stages), stage_bytes_(stage_bytes), lane_(lane) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
  }

  __device__ void Fill(const uint8_t* source, uint32_t bytes) {
    const uint32_t stage = base_ + fill_stage_ * stage_bytes_;
    for (uint32_t i = lane_ * 16; i < bytes; i += 512) {
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(stage + i),
                   "l"(source + i), "l"(policy_)
                   : "memory");
    }
    fill_stage_ = fill_stage_ + 1 == stages_ ? 0 : fill_stage_ + 1;
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // An empty group, so that "all but the newest n groups" keeps its meaning at the end.
  __device__ void FillNothing() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  __device__ uint32_t Wait() {
    WaitForAllBut(stages_ - 1);
    __syncwarp();
    return base_ + stage_ * stage_bytes_;
  }
  __device__ void Advance() { stage_ = stage_ + 1 == stages_ ? 0 : stage_ + 1; }

 private:
  __device__ static void WaitForAllBut(int groups) {
    switch (groups) {
      case 1:
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        break;
      case 2:
        asm volatile("cp.async.wait_group 2;" ::: "memory");
        break;
      case 3:
        asm volatile("cp.async.wait_group 3;" ::: "memory");
        break;
      default:
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        break;
    }
  }

  uint32_t base_;
  int stages_;
  uint32_t stage_bytes_;
  int lane_;
  int fill_stage_ = 0;
  int stage_ = 0;
  uint64_t policy_ = 0;
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
