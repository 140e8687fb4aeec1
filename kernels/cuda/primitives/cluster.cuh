// Thread block clusters (sm_90 and later): barrier and stores to another block's shared memory.
// On older devices the functions do nothing; no launcher asks for clusters there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashquant::cuda {

// Split barrier of all threads of the cluster. It orders no memory but what InitBarrier
// (mbarrier.cuh) wrote: an arrival that did would wait for all copies under way. A warp must arrive
// as a whole: one lane may still be starting copies.
__device__ __forceinline__ void ClusterArrive() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterWait() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Makes this thread's InitBarriers seen by the other blocks behind the next ClusterWait.
__device__ __forceinline__ void FenceBarrierInit() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// The address, in block `rank` of the cluster, of what is at `shared_address` in this one.
__device__ __forceinline__ uint32_t ClusterAddress(uint32_t shared_address, uint32_t rank) {
  uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address), "r"(rank));
#endif
  return address;
}

// Stores and, when it has arrived, counts 16 bytes on the barrier, which is in the same block. Its
// block waits by WaitForPhase. Deviation from PTX's memory model, which asks for an acquire at the
// cluster's scope there: that would empty the L1 cache and wait for all loads under way, and what
// arrives in shared memory is counted after it is there.
__device__ __forceinline__ void StoreClusterAsync16(uint32_t cluster_address, const float4& v,
                                                    uint32_t cluster_barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(cluster_address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(cluster_barrier)
      : "memory");
#endif
}

}  // namespace flashquant::cuda
