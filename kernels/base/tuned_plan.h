// How the fused INT4 kernel was measured to be best spread over a kind of GPU for a layer's shape:
// what `flashquant bench tune` finds, files keep and the planner (kernels/cuda/linear_w4a16/plan.h)
// takes.
#pragma once

#include <cstdint>

namespace flashquant {

struct TunedPlan {
  int32_t num_sms = 0;
  int32_t k = 0;
  int32_t n = 0;
  int32_t batch_blocks = 0;  // of 8 rows in a pass: 1, 2 or 4
  int32_t num_ranks = 0;
  bool cluster_join = false;
  int32_t num_warps = 0;
};

}  // namespace flashquant
