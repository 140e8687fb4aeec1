// See plan.h.
#include "kernels/cuda/linear_w4a16/plan.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "kernels/base/math_util.h"
#include "kernels/cuda/linear_w4a16/shared_layout.h"
#include "kernels/cuda/linear_w4a16/tuned_plans.h"

namespace flashquant::cuda {
namespace {

bool IsPossible(const LinearPlan& plan, const DeviceShape& device) {
  return !plan.cluster_join || (plan.num_ranks <= kMaxClusterRanks &&
                                device.max_clusters[static_cast<size_t>(plan.num_ranks)] > 0);
}

// Splits of the strips so that all blocks run at once, each with as many strips as the fullest
// needs.
void SetSplits(const PackedLayout& layout, const DeviceShape& device, LinearPlan* plan) {
  const int at_once = plan->cluster_join ? device.max_clusters[static_cast<size_t>(plan->num_ranks)]
                                         : device.num_sms / plan->num_ranks;
  const int most = std::clamp(at_once, 1, layout.num_strips);
  plan->num_splits = CeilDiv(layout.num_strips, CeilDiv(layout.num_strips, most));
}

// Stages of every warp's ring that fit.
int64_t NumStages(const PackedLayout& layout, const LinearPlan& plan, int m,
                  const DeviceShape& device) {
  const int64_t ring = device.shared_bytes - PlanFixedSharedBytes(layout, plan, m);
  return ring < 0 ? 0 : ring / (int64_t{plan.num_warps} * StageBytes(layout));
}

// Weights of the cost below, in the time of a unit: a fit to 1,500 timings on an H200 (seven
// shapes, 8 to 32 rows, 0 to 3% outliers), after which the plan of least cost was 2.4% slower than
// the best one measured in the mean, 15% at most. kWorkspaceStrip was raised later, when clusters
// had become better at many strips.
constexpr double kImbalance = 0.67;       // of the units that the busiest warp has too many
constexpr double kFewWarps = 0.32;        // of work, as the warps double
constexpr double kOneStage = 0.06;        // of work, without a copy in flight during the sums
constexpr double kActivations = 0.92;     // of a unit of K and eight rows
constexpr double kClusterRank = 0.47;     // of each rank of a cluster
constexpr double kWorkspace = 7.4;        // of a join through the workspace
constexpr double kManyRanks = 2.0;        // of each beyond what was measured
constexpr double kWorkspaceStrip = 25.0;  // of the same for each strip of a warp

// What a plan costs; negative when it does not fit.
double PlanCost(const PackedLayout& layout, const LinearPlan& plan, int m,
                const DeviceShape& device) {
  if (!CanNumberUnits(layout, plan)) return -1;
  const int64_t stages = NumStages(layout, plan, m, device);
  if (stages == 0) return -1;
  const int strips = CeilDiv(layout.num_strips, plan.num_splits);
  const int units = CeilDiv(layout.num_units, plan.num_ranks);
  const int total = strips * units;
  const int busiest = CeilDiv(total, plan.num_warps);
  double cost = total + kImbalance * (busiest * plan.num_warps - total);
  cost *= 1 + kFewWarps * (kMaxWarpsPerBlock - plan.num_warps) / plan.num_warps;
  if (stages == 1 && busiest > 1) cost *= 1 + kOneStage;
  cost += kActivations * units * BatchBlocks(m);
  if (plan.num_ranks == 1) return cost;
  if (plan.cluster_join) return cost + kClusterRank * plan.num_ranks;
  return cost + kWorkspace + kWorkspaceStrip * strips / (plan.num_warps * BatchBlocks(m)) +
         kManyRanks * std::max(0, plan.num_ranks - kMaxClusterRanks);
}

}  // namespace

bool CanNumberUnits(const PackedLayout& layout, const LinearPlan& plan) {
  const int64_t strips = CeilDiv(layout.num_strips, plan.num_splits);  // of a block
  return layout.num_units < 4096 && strips < int64_t{1} << 16 &&
         strips * layout.num_units < int64_t{1} << 20 &&
         int64_t{layout.num_strips} * layout.num_units <= std::numeric_limits<int32_t>::max();
}

int64_t PlanFixedSharedBytes(const PackedLayout& layout, const LinearPlan& plan, int m) {
  return LayOutShared(layout, plan, BatchBlocks(m)).ring_offset;
}

LinearPlan ChooseLinearPlan(const PackedLayout& layout, int m, const DeviceShape& device) {
  if (std::optional<LinearPlan> tuned = FindTunedPlan(layout, BatchBlocks(m), device)) {
    if (tuned->num_ranks >= 1 && tuned->num_ranks <= layout.num_units && tuned->num_warps >= 1 &&
        tuned->num_warps <= kMaxWarpsPerBlock && IsPossible(*tuned, device)) {
      SetSplits(layout, device, &*tuned);
      if (CanNumberUnits(layout, *tuned) && NumStages(layout, *tuned, m, device) > 0) return *tuned;
    }
  }
  LinearPlan best;
  best.num_splits = 0;
  double best_cost = 0;
  for (int ranks = 1; ranks <= std::min(layout.num_units, 64); ++ranks) {
    for (const bool cluster : {true, false}) {
      LinearPlan plan;
      plan.num_ranks = ranks;
      plan.cluster_join = cluster;
      if ((cluster && ranks == 1) || !IsPossible(plan, device)) continue;
      SetSplits(layout, device, &plan);
      for (plan.num_warps = 4; plan.num_warps <= kMaxWarpsPerBlock; ++plan.num_warps) {
        const double cost = PlanCost(layout, plan, m, device);
        if (cost >= 0 && (best.num_splits == 0 || cost < best_cost)) {
          best = plan;
          best_cost = cost;
        }
      }
    }
  }
  return best;
}

std::array<PassPlan, 3> ChoosePassPlans(const PackedLayout& layout, const DeviceShape& device) {
  std::array<PassPlan, 3> passes;
  int32_t rows = 8;
  for (size_t i = 0; i < passes.size(); ++i, rows *= 2) {
    const LinearPlan plan = ChooseLinearPlan(layout, rows, device);
    if (plan.num_splits > 0) {
      passes[i] = {plan, rows};
    } else if (i > 0) {
      passes[i] = passes[i - 1];  // many rows take more shared memory: more passes instead
    }
  }
  return passes;
}

}  // namespace flashquant::cuda
