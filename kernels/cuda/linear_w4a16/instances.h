// The fused kernel's instances, one function per source file: each compiles on its own, so that a
// build can spread them over cores.
#pragma once

namespace flashquant::cuda {

// The instance for 1, 2 or 4 quantization groups in a chunk, with or without zero points, for ranks
// that are a cluster or not; nullptr for any other number of groups.
const void* KernelM8Bulk(int groups_per_chunk, bool has_zeros, bool cluster_join);
const void* KernelM16Bulk(int groups_per_chunk, bool has_zeros, bool cluster_join);
const void* KernelM32Bulk(int groups_per_chunk, bool has_zeros, bool cluster_join);
const void* KernelM8CpAsync(int groups_per_chunk, bool has_zeros);
const void* KernelM16CpAsync(int groups_per_chunk, bool has_zeros);
const void* KernelM32CpAsync(int groups_per_chunk, bool has_zeros);

}  // namespace flashquant::cuda
