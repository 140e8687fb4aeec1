// cp.async (sm_80 and later): copies of 16 bytes from global to shared memory that each thread
// queues for itself, in groups; both addresses are multiples of 16. Source: PTX ISA, "Data
// Movement: cp.async".
#pragma once

#include <cstdint>

namespace flashquant::cuda {

__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Of the 16 bytes those from `bytes` (0 to 16) on become zeros.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// Ends a group, which may be empty.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when all of this thread's groups but the newest kGroups are there.
template <int kGroups>
__device__ __forceinline__ void WaitForCopiesAllBut() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
// The same for a number known at run time, at most 5: a larger one counts as 5.
__device__ __forceinline__ void WaitForCopiesAllBut(int groups) {
  switch (groups) {
    case 0:
      return WaitForCopiesAllBut<0>();
    case 1:
      return WaitForCopiesAllBut<1>();
    case 2:
      return WaitForCopiesAllBut<2>();
    case 3:
      return WaitForCopiesAllBut<3>();
    case 4:
      return WaitForCopiesAllBut<4>();
    default:
      return WaitForCopiesAllBut<5>();
  }
}

}  // namespace flashquant::cuda
