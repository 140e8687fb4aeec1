// Plan: how a layer is spread over a device for a number of batch rows. Pure host arithmetic.
// Source: design "kernel" 6. Deviation: no table of starts in memory; blocks are cut by K slice and
// whole strips (kernel_args.h), so that a plan is four numbers, and where a block's warps begin
// travels with the arguments (run_table.h).
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/base/tuned_plan.h"
#include "kernels/cuda/linear_w4a16/packed_format.h"

namespace flashquant::cuda {

inline constexpr int kMaxClusterRanks = 8;
inline constexpr int kMaxWarpsPerBlock = 12;  // leaves a thread 168 registers

// What the planner must know of a device.
struct DeviceShape {
  int num_sms = 0;
  int shared_bytes = 0;  // that a block may have
  // [r]: clusters of r blocks that run at once, one block per SM. SMs come in groups whose sizes
  // differ, so that this is less than num_sms / r. All 0: the device has no clusters.
  std::array<int, kMaxClusterRanks + 1> max_clusters{};
  // Measured by the user (`flashquant bench tune`), in any order; they go before the planner's own
  // (tuned_plans.h), and what does not fit is passed over.
  std::span<const TunedPlan> tuned_plans{};
};

struct LinearPlan {
  int32_t num_splits = 1;     // of the strips; at most num_strips
  int32_t num_ranks = 1;      // of K; at most num_units
  int32_t num_warps = 8;      // of a block; at most kMaxWarpsPerBlock
  bool cluster_join = false;  // the ranks of a split are one cluster (sm_90; at most 8 ranks)
};

// A plan, and the rows of a pass that it is for.
struct PassPlan {
  LinearPlan plan;
  int32_t rows_per_pass = 0;  // 8, 16 or 32; 0: the device has no plan
};

// Whether the kernel can number the layer's units with this plan: less than 4096 along K, 2^16
// strips and 2^20 units in a block, 2^31 in all: products of such numbers stay within 32 bits. No
// layer that fits a block's shared memory comes near so many along K.
bool CanNumberUnits(const PackedLayout& layout, const LinearPlan& plan);

// Bytes of shared memory besides the ring: barriers, activations and their sums, partial sums.
int64_t PlanFixedSharedBytes(const PackedLayout& layout, const LinearPlan& plan, int m);

// A plan for `m` rows (1 to 32 a pass) that fits the device; num_splits 0 when there is none.
LinearPlan ChooseLinearPlan(const PackedLayout& layout, int m, const DeviceShape& device);

// For up to 8, up to 16, and more rows: the largest pass of at most 8, 16 and 32 rows that the
// device has a plan for.
std::array<PassPlan, 3> ChoosePassPlans(const PackedLayout& layout, const DeviceShape& device);

}  // namespace flashquant::cuda
