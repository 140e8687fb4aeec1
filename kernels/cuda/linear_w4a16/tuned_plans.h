// Plans found by measuring (tests/gpu/run.sh kernels --sweep) for a few layers and devices; the
// planner's cost estimate is for all others.
#pragma once

#include <optional>

#include "kernels/cuda/linear_w4a16/plan.h"

namespace flashquant::cuda {

// num_splits is left to the caller. Nothing for layers or devices that nobody measured.
std::optional<LinearPlan> FindTunedPlan(const PackedLayout& layout, int batch_blocks,
                                        const DeviceShape& device);

}  // namespace flashquant::cuda
