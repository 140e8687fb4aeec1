// A ring of shared-memory stages that one warp fills for itself from global memory, each stage in
// two copies. Two forms with the same functions: bulk copies that complete on an mbarrier (sm_90
// and later; one lane issues them, they cost the others nothing) and cp.async groups (sm_80 and
// later). No block-wide barrier is involved in either, so warps of a block run independently.
#pragma once

#include <cstdint>

#include "kernels/cuda/primitives/cp_async.cuh"
#include "kernels/cuda/primitives/mbarrier.cuh"

namespace flashquant::cuda {

// Filling: CopyBoth, or CopyFirst then CopyRest, for each stage in the order 0, 1, ..., stages - 1,
// 0, ...; where nothing is left to copy, CopyNothing instead, so that the number of fills is the
// same on all paths. At the start CopyFirst of several stages may go before their CopyRest. All
// lanes call all functions, and have passed a __syncwarp behind the last read of what was in the
// stage.
template <bool kBulk>
class StageRing;

template <>
class StageRing<true> {
 public:
  // `base`: shared address of the first stage, 16-byte aligned; `barriers`: shared address of
  // `stages` 8-byte words of this warp. At most 32 stages.
  __device__ StageRing(uint32_t base, uint32_t barriers, int stages, uint32_t stage_bytes, int lane)
      : base_(base), barriers_(barriers), stage_bytes_(stage_bytes), lane_(lane) {
    if (lane == 0) {
      for (int i = 0; i < stages; ++i) {
        InitBarrier(barriers + 8 * i, 1);
      }
      FenceProxies();
    }
    __syncwarp();
  }

  // `bytes` is a multiple of 16 and may be 0.
  __device__ void CopyFirst(int stage, const uint8_t* source, uint32_t bytes) {
    if (lane_ != 0 || bytes == 0) return;
    ExpectMore(Barrier(stage), bytes);
    Copy(stage, 0, source, bytes);
  }
  // `offset`: in the stage.
  __device__ void CopyRest(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes) {
    if (lane_ != 0) return;
    ArriveExpecting(Barrier(stage), bytes);
    if (bytes != 0) Copy(stage, offset, source, bytes);
  }
  // `bytes` not 0.
  __device__ void CopyBoth(int stage, const uint8_t* source, uint32_t bytes,
                           const uint8_t* rest_source, uint32_t rest_bytes) {
    if (lane_ != 0) return;
    ArriveExpecting(Barrier(stage), bytes + rest_bytes);
    Copy(stage, 0, source, bytes);
    if (rest_bytes != 0) Copy(stage, bytes, rest_source, rest_bytes);
  }
  __device__ void CopyNothing() {}

  __device__ uint32_t Address(int stage) const { return base_ + stage * stage_bytes_; }

  // Returns when the next fill of `stage` is there.
  __device__ void Wait(int stage) {
    WaitForPhase(Barrier(stage), parities_ >> stage & 1);
    parities_ ^= 1u << stage;
  }
  // The same, for a fill out of the order.
  __device__ void WaitForAll(int stage) { Wait(stage); }

 private:
  __device__ uint32_t Barrier(int stage) const { return barriers_ + 8 * stage; }
  __device__ void Copy(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes) {
    BulkCopy(Address(stage) + offset, source, bytes, Barrier(stage));
  }

  uint32_t base_;
  uint32_t barriers_;
  uint32_t stage_bytes_;
  int lane_;
  uint32_t parities_ = 0;  // bit i: of stage i's next phase
};

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
    CommitCopies();
  }
  __device__ void CopyBoth(int stage, const uint8_t* source, uint32_t bytes,
                           const uint8_t* rest_source, uint32_t rest_bytes) {
    CopyFirst(stage, source, bytes);
    CopyRest(stage, bytes, rest_source, rest_bytes);
  }
  // An empty group, so that "all but the newest n groups" keeps its meaning at the end.
  __device__ void CopyNothing() { CommitCopies(); }

  __device__ uint32_t Address(int stage) const { return base_ + stage * stage_bytes_; }

  __device__ void Wait(int /*stage*/) {
    WaitForCopiesAllBut(stages_ - 1);
    __syncwarp();
  }
  __device__ void WaitForAll(int /*stage*/) {
    WaitForCopiesAllBut<0>();
    __syncwarp();
  }

 private:
  __device__ void Copy(uint32_t to, const uint8_t* source, uint32_t bytes) {
    for (uint32_t i = lane_ * 16; i < bytes; i += 512) {
      CopyAsync16(to + i, source + i);
    }
  }

  uint32_t base_;
  int stages_;
  uint32_t stage_bytes_;
  int lane_;
};

}  // namespace flashquant::cuda
