// threadIdx.x as a value that stays in a register. The compiler takes the special register for
// cheap and reads it again in every turn of a loop; the read takes some 20 clocks, which a loop of
// few warps waits for.
#pragma once

namespace flashquant::cuda {

__device__ __forceinline__ int ThreadOfBlock() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace flashquant::cuda
