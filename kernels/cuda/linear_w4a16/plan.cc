// See plan.h.
#include "kernels/cuda/linear_w4a16/plan.h"

#include <algorithm>

#include "kernels/cuda/linear_w4a16/shared_layout.h"

namespace flashquant::cuda {
namespace {

int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Units of the busiest warp: what the slowest part of the grid does.
int BusiestWarp(const PackedLayout& layout, const LinearPlan& plan) {
  const int strips = CeilDiv(layout.num_strips, plan.num_splits);
  const int units = CeilDiv(layout.num_units, plan.num_ranks);
  return CeilDiv(strips * units, plan.num_warps);
}

// Of the strips, so that all blocks run at once.
int MostSplits(const PackedLayout& layout, const LinearPlan& plan, const DeviceShape& device) {
  const int at_once = plan.cluster_join ? device.max_clusters[static_cast<size_t>(plan.num_ranks)]
                                        : device.num_sms / plan.num_ranks;
  return std::clamp(at_once, 1, layout.num_strips);
}

// Stages of every warp's ring that fit.
int64_t NumStages(const PackedLayout& layout, const LinearPlan& plan, int m,
                  const DeviceShape& device) {
  const int64_t ring = device.shared_bytes - PlanFixedSharedBytes(layout, plan, m);
  return ring < 0 ? 0 : ring / (int64_t{plan.num_warps} * StageBytes(layout));
}

}  // namespace

int64_t PlanFixedSharedBytes(const PackedLayout& layout, const LinearPlan& plan, int m) {
  return LayOutShared(layout, plan, BatchBlocks(m)).ring_offset;
}

LinearPlan ChooseLinearPlan(const PackedLayout& layout, int m, const DeviceShape& device) {
  LinearPlan best;
  best.num_splits = 0;
  int64_t best_cost = 0;
  const int max_warps = BatchBlocks(m) <= 2 ? kMaxWarpsPerBlock : 12;
  for (int ranks = 1; ranks <= std::min(layout.num_units, 64); ++ranks) {
    LinearPlan plan;
    plan.num_ranks = ranks;
    plan.cluster_join = ranks > 1 && ranks <= kMaxClusterRanks &&
                        device.max_clusters[static_cast<size_t>(ranks)] > 0;
    const int most_splits = MostSplits(layout, plan, device);
    plan.num_splits = CeilDiv(layout.num_strips, CeilDiv(layout.num_strips, most_splits));
    for (int warps = 4; warps <= max_warps; ++warps) {
      plan.num_warps = warps;
      const int64_t stages = NumStages(layout, plan, m, device);
      if (stages == 0) continue;
      // Work of the busiest block, then its joining and activations; ranks beyond a cluster join
      // through global memory.
      const int busiest = BusiestWarp(layout, plan);
      int64_t work = int64_t{busiest} * warps * 100;
      if (stages < 2 && busiest > 1) work += work / 4;
      if (warps < 8) work += work / 4 * (8 - warps);
      const int64_t join = ranks == 1 ? 0 : plan.cluster_join ? 40 * ranks : 400 + 40 * ranks;
      const int64_t x = 30 * int64_t{CeilDiv(layout.num_units, ranks)} * BatchBlocks(m);
      const int64_t cost = work + join + x - warps;
      if (best.num_splits == 0 || cost < best_cost) {
        best = plan;
        best_cost = cost;
      }
    }
  }
  return best;
}

}  // namespace flashquant::cuda
