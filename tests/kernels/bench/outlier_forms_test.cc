// Tests of the other forms of outliers that benchmarks compare with: CSR, and packed layers with
// slots by position.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/bench/csr_matrix.h"
#include "kernels/bench/linear_problem.h"
#include "kernels/bench/slot_order.h"
#include "tests/kernels/cuda/linear_w4a16/packed_decoder.h"

namespace flashquant::bench {
namespace {

using cuda::DecodedOutlier;
using cuda::PackedDecoder;

Problem RaggedProblem(OutlierLayout layout) {
  ProblemSpec spec;
  spec.k = 600;
  spec.n = 200;
  spec.density = 0.03;
  spec.layout = layout;
  return MakeProblem(spec, 2);
}

std::vector<DecodedOutlier> PackedOutliers(const cuda::PackedLinear& packed) {
  return PackedDecoder(packed.layout, packed.bytes).Outliers();
}

TEST(CsrMatrixTest, HoldsTheOutliersThatThePackedFormHolds) {
  const Problem problem = RaggedProblem(OutlierLayout::kRaggedRecords);
  const CsrMatrix csr = ToCsr(problem.outliers(), problem.spec.k, problem.spec.n);
  ASSERT_EQ(csr.row_begin.size(), 201u);
  std::vector<DecodedOutlier> found;
  for (int64_t row = 0; row < csr.rows; ++row) {
    const auto begin = static_cast<size_t>(csr.row_begin[static_cast<size_t>(row)]);
    const auto end = static_cast<size_t>(csr.row_begin[static_cast<size_t>(row) + 1]);
    for (size_t i = begin; i < end; ++i) found.push_back({row, csr.column[i], csr.value[i]});
  }
  EXPECT_TRUE(std::is_sorted(found.begin(), found.end())) << "rows, then rising columns";
  EXPECT_TRUE(found == PackedOutliers(cuda::PackLinear(problem.weight(), problem.outliers(), 2)));
}

TEST(CsrMatrixTest, AMatrixWithoutOutliersHasEmptyRows) {
  const CsrMatrix csr = ToCsr({}, 64, 3);
  EXPECT_EQ(csr.row_begin, std::vector<int32_t>(4, 0));
  EXPECT_TRUE(csr.column.empty());
}

TEST(SlotOrderTest, OrderingByPositionKeepsEveryOutlier) {
  for (const auto layout : {OutlierLayout::kRaggedRecords, OutlierLayout::kHotTile}) {
    const Problem problem = RaggedProblem(layout);
    cuda::PackedLinear packed = cuda::PackLinear(problem.weight(), problem.outliers(), 2);
    const std::vector<DecodedOutlier> before = PackedOutliers(packed);
    const std::vector<uint8_t> bytes = packed.bytes;
    OrderSlotsByPosition(packed);
    EXPECT_TRUE(PackedOutliers(packed) == before);
    EXPECT_FALSE(packed.bytes == bytes) << "the packer's own order is another";
  }
}

}  // namespace
}  // namespace flashquant::bench
