// A ring of shared-memory stages that one warp fills for itself from global memory, each stage in
// two copies. Two forms with the same functions: bulk copies that complete on an mbarrier (sm_90
// and later; one lane issues them, they cost the others nothing) and cp.async groups (sm_80 and
// later). No block-wide barrier is involved in either, so warps of a block run independently.
#pragma once

#include <cstdint>

#include "kernels/cuda/primitives/cp_async.cuh"
#include "kernels/cuda/primitives/mbarrier.cuh"

namespace flashquant::cuda {

// Filling: CopyFirst and later CopyRest for each stage in the order 0, 1, ..., stages - 1, 0, ...
// The first time instead StartFirst of each stage, when where the rest comes from is not known yet,
// and StartRests, by cp.async behind all StartFirst, because it makes the groups; the rest may be
// read behind WaitForRest. Where nothing is left to copy, CopyNothing instead, so that the number
// of fills is the same on all paths. All lanes call all functions, and have passed a __syncwarp
// behind the last use of what was in that part of the stage.
template <bool kBulk>
class StageRing;

template <>
class StageRing<true> {
 public:
  // At most this many stages; a warp's barriers are one more.
  static constexpr int kMaxStages = 6;

  // `base`: shared address of the first stage, 16-byte aligned; `barriers`: shared address of
  // kMaxStages + 1 8-byte words of this warp; `num_used`: stages that will be filled.
  __device__ StageRing(uint32_t base, uint32_t barriers, int /*stages*/, int num_used,
                       uint32_t stage_bytes, int lane)
      : base_(base), barriers_(barriers), stage_bytes_(stage_bytes), lane_(lane) {
    if (lane == 0) {
      InitBarrier(RestBarrier(), 1);
#pragma unroll
      for (int i = 0; i < kMaxStages; ++i) {
        if (i < num_used) InitBarrier(Barrier(i), 1);
      }
      FenceProxies();
    }
    __syncwarp();
  }

  // Here and below `bytes` is a multiple of 16 and not 0, `rest_bytes` may be 0.
  __device__ void StartFirst(int stage, const uint8_t* source, uint32_t bytes) {
    if (!ElectLane()) return;
    ArriveExpecting(Barrier(stage), bytes);
    Copy(stage, 0, source, bytes, Barrier(stage));
  }
  // Of all stages: lane i has that of stage i, 0 bytes behind the last. `offset`: in a stage.
  __device__ void StartRests(uint32_t offset, const uint8_t* rest_source, uint32_t rest_bytes) {
    if (rest_bytes != 0) {
      ExpectMore(RestBarrier(), rest_bytes);
      Copy(lane_, offset, rest_source, rest_bytes, RestBarrier());
    }
    __syncwarp();
    if (lane_ == 0) Arrive(RestBarrier());
  }
  __device__ void WaitForRest() { WaitForPhase(RestBarrier(), 0); }
  // Copies to one place in a stage that is in use, and waits.
  __device__ void CopyNow(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes) {
    if (ElectLane()) {
      ArriveExpecting(Barrier(stage), bytes);
      Copy(stage, offset, source, bytes, Barrier(stage));
    }
    Wait(stage);
  }
  __device__ void CopyFirst(int stage, const uint8_t* source, uint32_t bytes) {
    if (!ElectLane()) return;
    ExpectMore(Barrier(stage), bytes);
    Copy(stage, 0, source, bytes, Barrier(stage));
  }
  __device__ void CopyRest(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes) {
    if (!ElectLane()) return;
    ArriveExpecting(Barrier(stage), bytes);
    if (bytes != 0) Copy(stage, offset, source, bytes, Barrier(stage));
  }
  __device__ void CopyNothing() {}

  __device__ uint32_t Address(int stage) const { return base_ + stage * stage_bytes_; }

  // Returns when the next fill of `stage` is there.
  __device__ void Wait(int stage) {
    WaitForPhase(Barrier(stage), parities_ >> stage & 1);
    parities_ ^= 1u << stage;
  }

 private:
  __device__ uint32_t Barrier(int stage) const { return barriers_ + 8 * stage; }
  __device__ uint32_t RestBarrier() const { return barriers_ + 8 * kMaxStages; }
  __device__ void Copy(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes,
                       uint32_t barrier) {
    BulkCopy(Address(stage) + offset, source, bytes, barrier);
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
  __device__ StageRing(uint32_t base, uint32_t /*barriers*/, int stages, int /*num_used*/,
                       uint32_t stage_bytes, int lane)
      : base_(base), stages_(stages), stage_bytes_(stage_bytes), lane_(lane) {}

  // What StartFirst copies belongs to the first stage's group: only StartRests makes groups.
  __device__ void StartFirst(int stage, const uint8_t* source, uint32_t bytes) {
    Copy(Address(stage), source, bytes);
  }
  __device__ void StartRests(uint32_t offset, const uint8_t* rest_source, uint32_t rest_bytes) {
    for (int i = 0; i < stages_; ++i) {
      const auto address = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(rest_source), i);
      Copy(Address(i) + offset, reinterpret_cast<const uint8_t*>(address),
           __shfl_sync(0xffffffffu, rest_bytes, i));
      CommitCopies();
    }
  }
  __device__ void WaitForRest() {}
  __device__ void CopyNow(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes) {
    Copy(Address(stage) + offset, source, bytes);
    CommitCopies();
    WaitForCopiesAllBut<0>();
    __syncwarp();
  }
  __device__ void CopyFirst(int stage, const uint8_t* source, uint32_t bytes) {
    Copy(Address(stage), source, bytes);
  }
  __device__ void CopyRest(int stage, uint32_t offset, const uint8_t* source, uint32_t bytes) {
    Copy(Address(stage) + offset, source, bytes);
    CommitCopies();
  }
  // An empty group, so that "all but the newest n groups" keeps its meaning at the end.
  __device__ void CopyNothing() { CommitCopies(); }

  __device__ uint32_t Address(int stage) const { return base_ + stage * stage_bytes_; }

  __device__ void Wait(int /*stage*/) {
    WaitForCopiesAllBut(stages_ - 1);
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
