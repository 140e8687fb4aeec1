// Tests of the planner of the fused kernel: for every shape and device there is a plan, it fits in
// shared memory, and its parts cover every unit exactly once.
#include "kernels/cuda/linear_w4a16/plan.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/linear_w4a16/pack.h"
#include "kernels/cuda/linear_w4a16/shared_layout.h"

namespace flashquant::cuda {
namespace {

constexpr int kMostFeaturesAt99Kb = 28672;

DeviceShape Device(int num_sms, int shared_kb, bool clusters) {
  DeviceShape device;
  device.num_sms = num_sms;
  device.shared_bytes = shared_kb * 1024;
  for (int ranks = 1; clusters && ranks <= kMaxClusterRanks; ++ranks) {
    device.max_clusters[static_cast<size_t>(ranks)] = num_sms / ranks - (ranks > 2 ? 1 : 0);
  }
  return device;
}

std::vector<std::pair<std::string, DeviceShape>> Devices() {
  return {{"82 SMs, 99 KB", Device(82, 99, false)},     {"128 SMs, 99 KB", Device(128, 99, false)},
          {"170 SMs, 99 KB", Device(170, 99, false)},   {"20 SMs, 99 KB", Device(20, 99, false)},
          {"108 SMs, 163 KB", Device(108, 163, false)}, {"132 SMs, 227 KB", Device(132, 227, true)},
          {"78 SMs, 227 KB", Device(78, 227, true)}};
}

PackedLayout Layout(int64_t k, int64_t n, int64_t group_size, bool zeros, int max_outlier_bytes) {
  static const uint8_t kZeros[1] = {};
  Int4Arrays weight;
  weight.n = n;
  weight.k = k;
  weight.n_padded = (n + 7) / 8 * 8;
  weight.k_padded = (k + group_size - 1) / group_size * group_size;
  weight.group_size = group_size;
  weight.zeros = zeros ? kZeros : nullptr;
  PackedLayout layout = DenseLayout(weight);
  layout.max_outlier_bytes = max_outlier_bytes;
  return layout;
}

// K x N of the benchmarks, of small and odd models, and extremes.
const std::pair<int, int> kShapes[] = {
    {4096, 4096},   {4096, 6144},   {4096, 28672}, {14336, 4096},  {5120, 27648}, {13824, 5120},
    {14848, 75264}, {576, 1536},    {896, 4864},   {1536, 256},    {2560, 10240}, {3584, 18944},
    {18944, 3584},  {4096, 128256}, {28672, 8192}, {53248, 16384}, {8, 8},        {8, 131072},
    {65536, 8},     {256, 32},      {264, 40}};

template <typename Body>
void ForEachCase(Body&& body) {
  for (const auto& [name, device] : Devices()) {
    for (const auto& [k, n] : kShapes) {
      for (const bool outliers : {false, true}) {
        for (const bool fine : {false, true}) {  // the smallest groups with zero points, or not
          const PackedLayout layout =
              Layout(k, n, fine ? 32 : 128, fine, outliers ? kMaxPieceBytes : 0);
          for (const int m : {1, 8, 9, 16, 17, 32}) {
            // The one limit: with 99 KB, more features than this run in passes of eight rows.
            if (k > kMostFeaturesAt99Kb && m > 8 && device.shared_bytes < 160 * 1024) continue;
            SCOPED_TRACE(name + ", " + std::to_string(k) + "x" + std::to_string(n) + ", m " +
                         std::to_string(m) + (outliers ? ", outliers" : "") +
                         (fine ? ", groups of 32" : ""));
            body(layout, m, device);
          }
        }
      }
    }
  }
}

TEST(PlanTest, EveryShapeHasAPlanOnEveryDevice) {
  ForEachCase([](const PackedLayout& layout, int m, const DeviceShape& device) {
    EXPECT_GE(ChooseLinearPlan(layout, m, device).num_splits, 1);
  });
}

TEST(PlanTest, PlansStayWithinTheLimitsOfKernelAndDevice) {
  ForEachCase([](const PackedLayout& layout, int m, const DeviceShape& device) {
    const LinearPlan plan = ChooseLinearPlan(layout, m, device);
    EXPECT_LE(plan.num_splits, layout.num_strips);
    EXPECT_GE(plan.num_ranks, 1);
    EXPECT_LE(plan.num_ranks, layout.num_units);
    EXPECT_GE(plan.num_warps, 1);
    EXPECT_LE(plan.num_warps, kMaxWarpsPerBlock);
    if (plan.cluster_join) {
      ASSERT_LE(plan.num_ranks, kMaxClusterRanks);
      EXPECT_GT(plan.num_ranks, 1);
      EXPECT_GT(device.max_clusters[static_cast<size_t>(plan.num_ranks)], 0)
          << "no clusters of this size on this device";
    }
  });
}

TEST(PlanTest, EveryWarpHasAtLeastOneStageInSharedMemory) {
  ForEachCase([](const PackedLayout& layout, int m, const DeviceShape& device) {
    const LinearPlan plan = ChooseLinearPlan(layout, m, device);
    const int64_t ring = int64_t{plan.num_warps} * StageBytes(layout);
    EXPECT_LE(PlanFixedSharedBytes(layout, plan, m) + ring, device.shared_bytes);
  });
}

TEST(PlanTest, AllBlocksRunAtOnceWhereOneClusterOrRowOfBlocksFits) {
  ForEachCase([](const PackedLayout& layout, int m, const DeviceShape& device) {
    const LinearPlan plan = ChooseLinearPlan(layout, m, device);
    if (plan.cluster_join) {
      EXPECT_LE(plan.num_splits, device.max_clusters[static_cast<size_t>(plan.num_ranks)]);
    } else {
      EXPECT_LE(plan.num_splits * plan.num_ranks, std::max(device.num_sms, plan.num_ranks));
    }
  });
}

TEST(PlanTest, BlocksAndWarpsCoverEveryUnitOnce) {
  ForEachCase([](const PackedLayout& layout, int m, const DeviceShape& device) {
    const LinearPlan plan = ChooseLinearPlan(layout, m, device);
    ASSERT_GE(plan.num_splits, 1);
    const EvenSplit strips(layout.num_strips, plan.num_splits);
    const EvenSplit units(layout.num_units, plan.num_ranks);
    int64_t covered = 0;
    for (int split = 0; split < plan.num_splits; ++split) {
      ASSERT_EQ(strips.Begin(split + 1), strips.Begin(split) + strips.Size(split));
      for (int rank = 0; rank < plan.num_ranks; ++rank) {
        const EvenSplit runs(strips.Size(split) * units.Size(rank), plan.num_warps);
        for (int warp = 0; warp < plan.num_warps; ++warp) covered += runs.Size(warp);
      }
    }
    ASSERT_EQ(strips.Begin(plan.num_splits), layout.num_strips);
    ASSERT_EQ(units.Begin(plan.num_ranks), layout.num_units);
    EXPECT_EQ(covered, int64_t{layout.num_strips} * layout.num_units);
  });
}

TEST(PlanTest, PartsOfSharedMemoryAreAlignedAndDoNotOverlap) {
  ForEachCase([](const PackedLayout& layout, int m, const DeviceShape& device) {
    const LinearPlan plan = ChooseLinearPlan(layout, m, device);
    ASSERT_GE(plan.num_splits, 1);
    const SharedLayout shared = LayOutShared(layout, plan, BatchBlocks(m));
    const std::vector<uint32_t> starts = {kSharedHeadBytes,         shared.starts_offset,
                                          shared.x_offset,          shared.first_slots_offset,
                                          shared.join_slots_offset, shared.part_slots_offset,
                                          shared.ring_offset};
    EXPECT_TRUE(std::is_sorted(starts.begin(), starts.end()));
    for (const uint32_t start : starts) EXPECT_EQ(start % 16, 0u);
    EXPECT_EQ(shared.ring_offset, PlanFixedSharedBytes(layout, plan, m));
    EXPECT_EQ((shared.ring_offset | StageBytes(layout)) % 128, 0u) << "copies' places";
  });
}

TEST(PlanTest, ADeviceWithTooLittleSharedMemoryHasNoPlan) {
  const PackedLayout layout = Layout(4096, 4096, 128, false, 0);
  EXPECT_EQ(ChooseLinearPlan(layout, 8, Device(100, 8, false)).num_splits, 0);
}

TEST(PlanTest, PlansThatTheUserMeasuredGoFirstAndAreOnlyTakenWhereTheyFit) {
  DeviceShape device = Device(132, 227, true);
  const PackedLayout layout = Layout(2048, 4096, 128, false, 1024);
  const LinearPlan own = ChooseLinearPlan(layout, 8, device);
  const TunedPlan good = {132, 2048, 4096, 1, 2, false, 7};
  TunedPlan others[] = {good, good, good, good, good, good};
  others[0].num_sms = 131;
  others[1].n = 4104;
  others[2].batch_blocks = 2;
  others[3].num_ranks = 9;  // of 8 units of K
  others[4].num_warps = kMaxWarpsPerBlock + 1;
  others[5].num_ranks = 9;
  others[5].cluster_join = true;
  for (const TunedPlan& other : others) {
    device.tuned_plans = {&other, 1};
    const LinearPlan plan = ChooseLinearPlan(layout, 8, device);
    EXPECT_EQ(plan.num_ranks, own.num_ranks);
    EXPECT_EQ(plan.num_warps, own.num_warps);
    EXPECT_EQ(plan.cluster_join, own.cluster_join);
  }
  device.tuned_plans = {&good, 1};
  const LinearPlan plan = ChooseLinearPlan(layout, 8, device);
  EXPECT_EQ(plan.num_ranks, 2);
  EXPECT_EQ(plan.num_warps, 7);
  EXPECT_FALSE(plan.cluster_join);
  EXPECT_GE(plan.num_splits, 1);
}

TEST(PlanTest, ALayerOfMoreUnitsThanTheKernelCanNumberHasNoPlan) {
  const DeviceShape device = Device(132, 227, true);
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{4096 * kUnitK, 8},  // units of a strip
                             {int64_t{1} << 28, 8},  // and bytes that 32 bits do not hold
                             {(int64_t{1} << 31) - 8, (int64_t{1} << 31) - 8},
                             {kUnitK, int64_t{132} * 65537 * kStripN},  // strips of a block
                             {4095 * kUnitK, 132 * 257 * kStripN}}) {   // units of a block
    SCOPED_TRACE(std::to_string(k) + "x" + std::to_string(n));
    for (const int m : {8, 32}) {
      EXPECT_EQ(ChooseLinearPlan(Layout(k, n, 128, false, 0), m, device).num_splits, 0);
    }
  }
  EXPECT_GE(ChooseLinearPlan(Layout(65536, 262144, 32, true, 4096), 32, device).num_splits, 1);
}

TEST(PlanTest, ChoosingPassesKeepsToThePlansForAsManyRowsAsGoTogether) {
  const DeviceShape device = Device(132, 227, true);
  const PackedLayout layout = Layout(4096, 6144, 128, false, 512);
  const std::array<PassPlan, 3> passes = ChoosePassPlans(layout, device);
  for (size_t i = 0; i < passes.size(); ++i) {
    const int rows = 8 << i;
    EXPECT_EQ(passes[i].rows_per_pass, rows);
    const LinearPlan plan = ChooseLinearPlan(layout, rows, device);
    EXPECT_EQ(passes[i].plan.num_ranks, plan.num_ranks);
    EXPECT_EQ(passes[i].plan.num_splits, plan.num_splits);
    EXPECT_EQ(passes[i].plan.num_warps, plan.num_warps);
    EXPECT_EQ(passes[i].plan.cluster_join, plan.cluster_join);
  }
}

TEST(PlanTest, RowsThatDoNotFitTogetherRunInSmallerPasses) {
  const PackedLayout layout = Layout(65536, 8192, 32, true, kMaxPieceBytes);
  const DeviceShape device = Device(128, 99, false);
  ASSERT_GE(ChooseLinearPlan(layout, 8, device).num_splits, 1);
  ASSERT_EQ(ChooseLinearPlan(layout, 32, device).num_splits, 0);
  const std::array<PassPlan, 3> passes = ChoosePassPlans(layout, device);
  EXPECT_EQ(passes[0].rows_per_pass, 8);
  for (const PassPlan& pass : passes) {
    ASSERT_GE(pass.plan.num_splits, 1);
    EXPECT_LE(PlanFixedSharedBytes(layout, pass.plan, pass.rows_per_pass) +
                  int64_t{pass.plan.num_warps} * StageBytes(layout),
              device.shared_bytes);
  }
}

TEST(PlanTest, WithoutAnyPlanThereIsNoPass) {
  for (const PassPlan& pass :
       ChoosePassPlans(Layout(4096, 4096, 128, false, 0), Device(100, 8, false))) {
    EXPECT_EQ(pass.rows_per_pass, 0);
  }
}

TEST(PlanTest, BigLayersUseMostOfTheDevice) {
  for (const auto& [name, device] : Devices()) {
    SCOPED_TRACE(name);
    const LinearPlan plan = ChooseLinearPlan(Layout(14848, 75264, 128, false, 512), 8, device);
    EXPECT_GE(plan.num_splits * plan.num_ranks * 5, device.num_sms * 4);
  }
}

}  // namespace
}  // namespace flashquant::cuda
