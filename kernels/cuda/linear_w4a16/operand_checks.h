// What both launchers of the fused kernels ask of their operands (launchers.h). Host only.
#pragma once

#include <cstdint>

#include "kernels/cuda/launchers.h"

namespace flashquant::cuda {

inline bool IsAligned(const void* pointer, uintptr_t bytes) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Sizes, strides and alignments; not the plan.
inline bool HasValidOperands(const LinearW4A16Params& p) {
  const PackedLayout& layout = p.layout;
  const bool sizes = p.m >= 1 && layout.k >= 8 && layout.n >= 8 && layout.k % 8 == 0 &&
                     layout.n % 8 == 0 && p.x_stride >= layout.k && p.x_stride % 8 == 0 &&
                     p.y_stride >= layout.n && p.y_stride % 4 == 0;
  return sizes && IsAligned(p.x, 16) && IsAligned(p.y, 8) && IsAligned(p.weight, 16) &&
         IsAligned(p.workspace, 16) && IsAligned(p.counters, 4);
}

}  // namespace flashquant::cuda
