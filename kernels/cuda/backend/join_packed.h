// Joins packed layers along N: q, k and v, or gate and up, become one weight and one launch. Needs
// no CUDA.
#pragma once

#include <vector>

#include "kernels/cuda/linear_w4a16/pack.h"

namespace flashquant::cuda {

// Whether `next` may follow `before`: the same form, and no strip shared by both.
bool CanFollow(const PackedLayout& before, const PackedLayout& next);

// The bytes that packing the joined layer would give. Each part but the first can follow the one
// before it; at least one part.
PackedLinear JoinPacked(const std::vector<PackedLinear>& parts);

}  // namespace flashquant::cuda
