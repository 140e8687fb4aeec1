// Instances of the kernel for many rows, one function per source file: each compiles on its own.
#pragma once

namespace flashquant::cuda {

// The instance for 1, 2 or 4 quantization groups in a chunk, with or without zero points; nullptr
// for any other number.
const void* ManyRowsKernelM32(int groups_per_chunk, bool has_zeros);
const void* ManyRowsKernelM64(int groups_per_chunk, bool has_zeros);
const void* ManyRowsKernelM96(int groups_per_chunk, bool has_zeros);
const void* ManyRowsKernelM128(int groups_per_chunk, bool has_zeros);

}  // namespace flashquant::cuda
