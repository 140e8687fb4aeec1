// Tests of the figures that need no GPU, against sizes worked out here.
#include "kernels/bench/paper_figures.h"

#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/bench/kernel_bench.h"
#include "tests/support/status_matchers.h"

namespace flashquant::bench {
namespace {

using testing::HasSubstr;

const FigureSeries& SeriesNamed(const Figure& figure, const std::string& name) {
  for (const FigureSeries& series : figure.series) {
    if (series.name == name) return series;
  }
  ADD_FAILURE() << "no series " << name;
  return figure.series[0];
}

std::vector<Figure> MakeAll(int number, const FigureOptions& options) {
  absl::StatusOr<std::vector<Figure>> figures = MakePaperFigure(number, options);
  EXPECT_TRUE(figures.ok()) << figures.status();
  return figures.ok() ? *std::move(figures) : std::vector<Figure>(2);
}

Figure Make(int number, const FigureOptions& options) { return MakeAll(number, options)[0]; }

TEST(PaperFiguresTest, PreprocessingHasATimeForEveryMatrixAndDensity) {
  const Figure figure = Make(9, {.shapes = {{256, 128}, {512, 64}}, .densities = {0.01, 0.04}});
  ASSERT_EQ(figure.x.size(), 4u);
  EXPECT_THAT(figure.x[3], HasSubstr("512x64 4%"));
  for (const FigureSeries& series : figure.series) {
    ASSERT_EQ(series.values.size(), 4u);
    for (const double seconds : series.values) EXPECT_GT(seconds, 0);
  }
}

TEST(PaperFiguresTest, StorageFollowsTheFormulasOfBothFormats) {
  const Figure figure = Make(10, {.shapes = {{512, 256}}, .densities = {0.01, 0.03}});
  const double dense = 2.0 * 512 * 256;
  const std::vector<double> densities = {0.01, 0.03};
  for (size_t i = 0; i < 2; ++i) {
    const double slots = std::round(densities[i] * 512 * 256);
    // Four tiles of 256 x 128 with 32 buckets each.
    EXPECT_NEAR(SeriesNamed(figure, "Tile-COO, formula").values[i],
                100 * (4 * 5 + 4 * 4 * 32 + 4 * slots) / dense, 1e-9);
    EXPECT_NEAR(SeriesNamed(figure, "CSR").values[i], 100 * (4 * 257 + 6 * slots) / dense, 1e-9);
  }
}

TEST(PaperFiguresTest, RealFilesOfGroupedOutliersAreAHeaderLargerThanTheFormula) {
  const Figure figure = Make(10, {.shapes = {{2048, 1024}}, .densities = {0.02}});
  const double formula = SeriesNamed(figure, "Tile-COO, formula").values[0];
  const double grouped = SeriesNamed(figure, "Tile-COO file, groups of 4").values[0];
  const double scattered = SeriesNamed(figure, "Tile-COO file, scattered").values[0];
  EXPECT_NEAR(grouped, formula, 0.05 * formula);
  EXPECT_GT(scattered, grouped) << "scattered outliers pad records";
}

TEST(PaperFiguresTest, TrafficCountsWhatEachPipelineMoves) {
  const std::vector<Figure> figures =
      MakeAll(12, {.shapes = {{1024, 512}}, .ms = {16}, .densities = {0.0, 0.03}});
  ASSERT_EQ(figures.size(), 2u);
  const Figure& figure = figures[0];
  const double weights = 1024.0 * 512;
  const double dense = weights / 2 + weights / 128 * 2;  // codes, BF16 scales
  const double x = 16 * 1024 * 2;
  const double y = 16 * 512 * 2;
  const double units = weights / (256 * 32);
  // Without outliers: the index, against row offsets and x and y once more.
  EXPECT_NEAR(SeriesNamed(figure, "fused").values[0] * 1e6, dense + x + y + 8 * units, 1);
  EXPECT_NEAR(SeriesNamed(figure, "dense only + CSR").values[0] * 1e6,
              dense + x + y + 4 * 513 + x + 2 * y, 1);
  const double fused = SeriesNamed(figure, "fused").values[1] * 1e6;
  const double slots = 0.03 * weights;
  EXPECT_GE(fused, dense + x + y + 8 * units + 4 * slots);
  EXPECT_LE(fused, dense + x + y + 8 * units + 4 * slots + units * 32) << "trailer and padding";
  const double unfused = SeriesNamed(figure, "dense only + CSR").values[1] * 1e6;
  EXPECT_NEAR(SeriesNamed(figures[1], "of all traffic").values[1], 100 * (1 - fused / unfused),
              1e-9);
}

TEST(PaperFiguresTest, OneMatrixFiguresRefuseSeveral) {
  for (const int number : {8, 10, 12}) {
    EXPECT_THAT(MakePaperFigure(number, {.shapes = {{64, 64}, {64, 128}}}).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, testing::_));
  }
  for (const int number : {6, 13}) {
    EXPECT_THAT(MakePaperFigure(number, {}).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, testing::_));
  }
}

TEST(PaperFiguresTest, TimesNeedAGpu) {
  std::string device;
  std::string error;
  if (DescribeBenchDevice(&device, &error)) GTEST_SKIP() << "there is a GPU";
  EXPECT_FALSE(error.empty());
  for (const int number : {7, 8, 11}) {
    EXPECT_THAT(MakePaperFigure(number, {.shapes = {{256, 256}}}).status(),
                StatusIs(absl::StatusCode::kUnavailable, testing::_));
  }
}

TEST(GeometricMeanTest, LeavesOutWhatWasNotMeasured) {
  EXPECT_NEAR(GeometricMean({2, 0, 8}), 4, 1e-12);
  EXPECT_EQ(GeometricMean({0, 0}), 0);
}

}  // namespace
}  // namespace flashquant::bench
