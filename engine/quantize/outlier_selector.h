// Which weights become outliers, counted in what they cost: stored slots.
//
// A record holds four slots of one (tile, column), so the unit that is chosen is a record. For
// every tile column there is a curve "least error with 0, 1, 2, ... records"; SelectRecords takes
// the records with the largest benefit of a whole layer until the budget is used, so no slot is
// left empty. SlotSplitter shares the slots of a tile column among its quantization groups.
//
// Source: design "Fused kernel" 4.5 (group-aware selection); Deviation: the benefit of a record is
// the fall of the best achievable error, the scales of the shrunken groups included, not the error
// at fixed scales.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace flashquant {

// How the benefit of an outlier is measured. kErrorWithRescale is the one to use, the others are
// kept for comparison (tests/quality).
enum class OutlierRule : uint8_t {
  kMagnitude,        // squared weight
  kError,            // squared error at the scale found without outliers
  kErrorWithRescale  // error saved, the gain of a finer scale for the rest included
};

// Shares slots among groups for the least sum of errors.
class SlotSplitter final {
 public:
  // curves: [num_groups, curve_length], error of a group with 0, 1, ... weights left out; infinite
  // where that many cannot be. Afterwards error(s) and Split(s) answer for s = 0 .. max_slots.
  void Combine(std::span<const float> curves, int num_groups, int curve_length, int max_slots);

  // Least sum of errors with exactly `slots` slots; infinite when the groups cannot use that many.
  double error(int slots) const { return best_[static_cast<size_t>(slots)]; }
  // How many of `slots` each group gets; error(slots) must be finite. slots_of_group: [num_groups].
  void Split(int slots, std::span<int32_t> slots_of_group) const;

 private:
  int num_groups_ = 0;
  int max_slots_ = 0;
  std::vector<double> best_;
  std::vector<double> next_;
  std::vector<int16_t> choice_;  // [num_groups, max_slots + 1], slots of that group
};

// curves: [num_columns, curve_length], error of a tile column with 0, 1, ... records (infinite
// where it cannot have so many). Returns the number of records of each column: at most `budget` in
// all, each with a benefit above `least_benefit`, chosen by benefit per record. Ties go to the
// lower column. The same for any num_threads.
std::vector<int32_t> SelectRecords(std::span<const float> curves, int curve_length, int64_t budget,
                                   double least_benefit = 0, int num_threads = 1);

}  // namespace flashquant
