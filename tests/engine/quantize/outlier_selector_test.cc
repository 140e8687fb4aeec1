// Selection of records against brute force on small cases.
#include "engine/quantize/outlier_selector.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> FallingCurve(std::mt19937& random, int length, bool convex) {
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  std::vector<float> steps;
  for (int i = 1; i < length; ++i) steps.push_back(uniform(random));
  if (convex) std::sort(steps.begin(), steps.end(), std::greater<>());
  std::vector<float> curve = {20.0f};
  for (float step : steps) curve.push_back(curve.back() - step);
  return curve;
}

TEST(SlotSplitterTest, AgreesWithTryingEverySplit) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 50; ++trial) {
    constexpr int kLength = 5;
    std::vector<float> curves;
    for (int group = 0; group < 3; ++group) {
      const std::vector<float> curve = FallingCurve(random, kLength, false);
      curves.insert(curves.end(), curve.begin(), curve.end());
    }
    SlotSplitter splitter;
    splitter.Combine(curves, 3, kLength, 8);
    for (int slots = 0; slots <= 8; ++slots) {
      double least = std::numeric_limits<double>::infinity();
      for (int a = 0; a < kLength; ++a) {
        for (int b = 0; b < kLength; ++b) {
          const int c = slots - a - b;
          if (c < 0 || c >= kLength) continue;
          least = std::min(least,
                           static_cast<double>(curves[static_cast<size_t>(a)]) +
                               static_cast<double>(curves[static_cast<size_t>(kLength + b)]) +
                               static_cast<double>(curves[static_cast<size_t>(2 * kLength + c)]));
        }
      }
      EXPECT_DOUBLE_EQ(splitter.error(slots), least);
      std::vector<int32_t> split(3);
      splitter.Split(slots, split);
      EXPECT_EQ(std::accumulate(split.begin(), split.end(), 0), slots);
      double sum = 0;
      for (size_t group = 0; group < 3; ++group) {
        sum += static_cast<double>(curves[group * kLength + static_cast<size_t>(split[group])]);
      }
      EXPECT_DOUBLE_EQ(sum, least);
    }
  }
}

TEST(SlotSplitterTest, MoreSlotsThanTheGroupsCanUseIsInfinite) {
  const std::vector<float> curves = {3, 2, kInf, 5, 4, 1};
  SlotSplitter splitter;
  splitter.Combine(curves, 2, 3, 4);
  EXPECT_DOUBLE_EQ(splitter.error(3), 3);
  EXPECT_TRUE(std::isinf(splitter.error(4)));
}

TEST(SelectRecordsTest, ConvexCurvesGiveTheBestTotalForEveryBudget) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 30; ++trial) {
    constexpr int kLength = 4;
    std::vector<float> curves;
    std::vector<float> gains;
    for (int column = 0; column < 5; ++column) {
      const std::vector<float> curve = FallingCurve(random, kLength, true);
      for (size_t i = 1; i < kLength; ++i) gains.push_back(curve[i - 1] - curve[i]);
      curves.insert(curves.end(), curve.begin(), curve.end());
    }
    std::sort(gains.begin(), gains.end(), std::greater<>());
    for (int64_t budget = 0; budget <= 15; ++budget) {
      const std::vector<int32_t> records = SelectRecords(curves, kLength, budget);
      EXPECT_EQ(std::accumulate(records.begin(), records.end(), int64_t{0}), budget);
      double gain = 0;
      for (size_t column = 0; column < 5; ++column) {
        gain +=
            static_cast<double>(curves[column * kLength] -
                                curves[column * kLength + static_cast<size_t>(records[column])]);
      }
      const double best = std::accumulate(gains.begin(), gains.begin() + budget, 0.0);
      EXPECT_NEAR(gain, best, 1e-4);
    }
  }
}

TEST(SelectRecordsTest, RecordThatPaysOnlyTogetherWithTheNextIsFound) {
  // Column 0: nothing for one record, 10 for two. Column 1: 3, then 1.
  const std::vector<float> curves = {20, 20, 10, 20, 17, 16};
  EXPECT_EQ(SelectRecords(curves, 3, 2), (std::vector<int32_t>{2, 0}));
  EXPECT_EQ(SelectRecords(curves, 3, 3), (std::vector<int32_t>{2, 1}));
}

TEST(SelectRecordsTest, BudgetThatAHullSegmentDoesNotFitIsStillSpent) {
  const std::vector<float> curves = {20, 19, 10, 20, 17, 16};
  EXPECT_EQ(SelectRecords(curves, 3, 1), (std::vector<int32_t>{0, 1}));
  const std::vector<float> alone = {20, 19, 10};
  EXPECT_EQ(SelectRecords(alone, 3, 1), (std::vector<int32_t>{1}));
}

TEST(SelectRecordsTest, RecordsWithoutBenefitAreNotTaken) {
  const std::vector<float> curves = {5, 5, 5, 0, kInf, kInf};
  EXPECT_EQ(SelectRecords(curves, 3, 10), (std::vector<int32_t>{0, 0}));
}

TEST(SelectRecordsTest, LargerBudgetKeepsWhatASmallerOneChose) {
  std::mt19937 random(4);
  std::vector<float> curves;
  for (int column = 0; column < 40; ++column) {
    const std::vector<float> curve = FallingCurve(random, 6, true);
    curves.insert(curves.end(), curve.begin(), curve.end());
  }
  std::vector<int32_t> before = SelectRecords(curves, 6, 0);
  for (int64_t budget = 1; budget <= 200; ++budget) {
    const std::vector<int32_t> records = SelectRecords(curves, 6, budget);
    for (size_t column = 0; column < records.size(); ++column) {
      EXPECT_GE(records[column], before[column]);
    }
    before = records;
  }
}

}  // namespace
}  // namespace flashquant
