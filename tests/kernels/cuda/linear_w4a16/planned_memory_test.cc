// The sizes that a memory plan takes for the fused kernel's form against those of real packed
// layers: exact without outliers, and close with them, whose padding depends on where they are.
#include "kernels/planned_memory.h"

#include <vector>

#include "gtest/gtest.h"
#include "kernels/bench/linear_problem.h"
#include "kernels/cuda/linear_w4a16/pack.h"

namespace flashquant {
namespace {

int64_t PackedBytes(const bench::Problem& problem) {
  return cuda::PackLinear(problem.weight(), problem.outliers(), 2).layout.num_bytes;
}

PlannedPart Planned(const bench::Problem& problem) {
  PlannedPart part;
  part.n = problem.spec.n;
  part.k = problem.spec.k;
  part.int4 = true;
  part.group_size = problem.spec.group_size == -1 ? problem.spec.k : problem.spec.group_size;
  part.symmetric = !problem.spec.zero_points;
  part.outlier_records = static_cast<int64_t>(problem.records.size()) / 16;
  return part;
}

TEST(PlannedMemoryTest, ALayerWithoutOutliersTakesWhatIsPlanned) {
  for (const int group_size : {32, 64, 128, -1}) {
    for (const bool zero_points : {false, true}) {
      for (const auto& [k, n] : {std::pair{512, 256}, std::pair{896, 1152}, std::pair{576, 40}}) {
        const bench::Problem problem = bench::MakeProblem(
            {.k = k, .n = n, .group_size = group_size, .zero_points = zero_points}, 2);
        SCOPED_TRACE(problem.spec.Name());
        EXPECT_EQ(PlannedWeightBytes(std::vector{Planned(problem)}), PackedBytes(problem));
      }
    }
  }
}

TEST(PlannedMemoryTest, OutliersTakeAtMostAPercentOfTheLayerMoreThanIsPlanned) {
  for (const double density : {0.005, 0.01, 0.03, 0.1}) {
    const bench::Problem problem =
        bench::MakeProblem({.k = 2048, .n = 1024, .density = density}, 2);
    SCOPED_TRACE(problem.spec.Name());
    const auto packed = static_cast<double>(PackedBytes(problem));
    const auto planned = static_cast<double>(PlannedWeightBytes(std::vector{Planned(problem)}));
    EXPECT_GT(planned, 0.99 * packed);
    EXPECT_LT(planned, 1.02 * packed);
  }
}

TEST(PlannedMemoryTest, PartsThatTheFusedKernelCannotTakeArePlannedInBfloat16) {
  const PlannedPart odd = {.n = 100, .k = 128, .int4 = true};
  EXPECT_EQ(PlannedWeightBytes(std::vector{odd}), 100 * 128 * 2);
  const PlannedPart dense = {.n = 96, .k = 128, .has_bias = true};
  EXPECT_EQ(PlannedWeightBytes(std::vector{dense}), 96 * 128 * 2 + 96 * 2);
}

}  // namespace
}  // namespace flashquant
