// See tuned_plans.h. Those of least time with 1% times that with 3% outliers.
#include "kernels/cuda/linear_w4a16/tuned_plans.h"

namespace flashquant::cuda {
namespace {

constexpr TunedPlan kPlans[] = {
    // H200, 1 December 2026; four batch blocks and 14848 x 75264 the day before
    {132, 4096, 4096, 1, 8, true, 9},      {132, 4096, 4096, 2, 8, true, 9},
    {132, 4096, 4096, 4, 8, true, 9},      {132, 4096, 6144, 1, 2, true, 12},
    {132, 4096, 6144, 2, 8, true, 9},      {132, 4096, 6144, 4, 8, false, 12},
    {132, 4096, 28672, 1, 2, true, 12},    {132, 4096, 28672, 2, 2, true, 8},
    {132, 4096, 28672, 4, 4, false, 12},   {132, 14336, 4096, 1, 8, true, 12},
    {132, 14336, 4096, 2, 8, true, 8},     {132, 14336, 4096, 4, 8, false, 8},
    {132, 5120, 27648, 1, 2, true, 12},    {132, 5120, 27648, 2, 3, false, 12},
    {132, 5120, 27648, 4, 3, false, 12},   {132, 13824, 5120, 1, 8, true, 12},
    {132, 13824, 5120, 2, 8, true, 12},    {132, 13824, 5120, 4, 8, false, 12},
    {132, 14848, 75264, 1, 8, true, 12},   {132, 14848, 75264, 2, 6, false, 12},
    {132, 14848, 75264, 4, 10, false, 12},
};

std::optional<LinearPlan> Find(std::span<const TunedPlan> plans, const PackedLayout& layout,
                               int batch_blocks, int num_sms) {
  for (const TunedPlan& tuned : plans) {
    if (tuned.num_sms != num_sms || tuned.k != layout.k || tuned.n != layout.n ||
        tuned.batch_blocks != batch_blocks) {
      continue;
    }
    LinearPlan plan;
    plan.num_ranks = tuned.num_ranks;
    plan.num_warps = tuned.num_warps;
    plan.cluster_join = tuned.cluster_join;
    return plan;
  }
  return std::nullopt;
}

}  // namespace

std::optional<LinearPlan> FindTunedPlan(const PackedLayout& layout, int batch_blocks,
                                        const DeviceShape& device) {
  if (layout.max_outlier_bytes == 0) return std::nullopt;
  if (const auto plan = Find(device.tuned_plans, layout, batch_blocks, device.num_sms)) return plan;
  return Find(kPlans, layout, batch_blocks, device.num_sms);
}

}  // namespace flashquant::cuda
