// A column's benefits need not fall from record to record (a group with six large weights gains
// little from four slots and much from eight), so records are ranked by the upper concave hull of
// each column's curve, as in rate-distortion allocation.
#include "engine/quantize/outlier_selector.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/quantize/parallel_for.h"
#include "kernels/base/check.h"
#include "kernels/base/math_util.h"

namespace flashquant {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kColumnsPerTask = 4096;

// `length` more records for `column`, each worth `rate`.
struct Segment {
  float rate = 0;
  int32_t column = 0;
  int32_t length = 0;
};

void AppendHull(std::span<const float> curve, int32_t column, std::vector<Segment>* segments) {
  size_t at = 0;
  while (at + 1 < curve.size()) {
    double best_rate = 0;
    size_t best_end = at;
    for (size_t end = at + 1; end < curve.size() && std::isfinite(curve[end]); ++end) {
      const double rate = (static_cast<double>(curve[at]) - static_cast<double>(curve[end])) /
                          static_cast<double>(end - at);
      if (rate > best_rate) {
        best_rate = rate;
        best_end = end;
      }
    }
    if (best_end == at) return;
    segments->push_back(
        {static_cast<float>(best_rate), column, static_cast<int32_t>(best_end - at)});
    at = best_end;
  }
}

// Of all columns, in their order.
std::vector<Segment> Hulls(std::span<const float> curves, size_t length, size_t num_columns,
                           int num_threads) {
  const auto count = static_cast<int64_t>(num_columns);
  std::vector<std::vector<Segment>> parts(static_cast<size_t>(CeilDiv(count, kColumnsPerTask)));
  ParallelFor(num_threads, count, kColumnsPerTask, [&](int64_t begin, int64_t end) {
    std::vector<Segment>& part = parts[static_cast<size_t>(begin / kColumnsPerTask)];
    for (int64_t column = begin; column < end; ++column) {
      AppendHull(curves.subspan(static_cast<size_t>(column) * length, length),
                 static_cast<int32_t>(column), &part);
    }
  });
  std::vector<Segment> segments;
  for (const std::vector<Segment>& part : parts) {
    segments.insert(segments.end(), part.begin(), part.end());
  }
  return segments;
}

bool ByRate(const Segment& a, const Segment& b) {
  if (a.rate != b.rate) return a.rate > b.rate;
  return a.column < b.column;
}

// What whole segments left over goes to single records, most useful first.
void SpendRest(std::span<const float> curves, size_t curve_length, int64_t budget,
               float least_benefit, std::vector<int32_t>* records) {
  while (budget > 0) {
    std::vector<Segment> singles;
    for (size_t column = 0; column < records->size(); ++column) {
      const size_t at = static_cast<size_t>((*records)[column]);
      if (at + 1 >= curve_length) continue;
      const float gain =
          curves[column * curve_length + at] - curves[column * curve_length + at + 1];
      if (std::isfinite(gain) && gain > least_benefit) {
        singles.push_back({gain, static_cast<int32_t>(column), 1});
      }
    }
    if (singles.empty()) return;
    std::sort(singles.begin(), singles.end(), ByRate);
    for (const Segment& single : singles) {
      if (budget == 0) return;
      ++(*records)[static_cast<size_t>(single.column)];
      --budget;
    }
  }
}

}  // namespace

void SlotSplitter::Combine(std::span<const float> curves, int num_groups, int curve_length,
                           int max_slots) {
  num_groups_ = num_groups;
  max_slots_ = max_slots;
  const size_t width = static_cast<size_t>(max_slots) + 1;
  best_.assign(width, kInfinity);
  best_[0] = 0;
  choice_.assign(static_cast<size_t>(num_groups) * width, 0);
  for (int group = 0; group < num_groups; ++group) {
    next_.assign(width, kInfinity);
    int16_t* choice = choice_.data() + static_cast<size_t>(group) * width;
    const float* curve =
        curves.data() + static_cast<size_t>(group) * static_cast<size_t>(curve_length);
    for (int before = 0; before <= max_slots; ++before) {
      const double base = best_[static_cast<size_t>(before)];
      if (!std::isfinite(base)) continue;
      const int most = std::min(curve_length - 1, max_slots - before);
      for (int own = 0; own <= most; ++own) {
        const double sum = base + static_cast<double>(curve[own]);
        if (sum < next_[static_cast<size_t>(before + own)]) {
          next_[static_cast<size_t>(before + own)] = sum;
          choice[before + own] = static_cast<int16_t>(own);
        }
      }
    }
    best_.swap(next_);
  }
}

void SlotSplitter::Split(int slots, std::span<int32_t> slots_of_group) const {
  FQ_DCHECK(std::isfinite(error(slots)));
  const size_t width = static_cast<size_t>(max_slots_) + 1;
  for (int group = num_groups_ - 1; group >= 0; --group) {
    const size_t index = static_cast<size_t>(group);
    slots_of_group[index] = choice_[index * width + static_cast<size_t>(slots)];
    slots -= slots_of_group[index];
  }
}

std::vector<int32_t> SelectRecords(std::span<const float> curves, int curve_length, int64_t budget,
                                   double least_benefit, int num_threads) {
  const size_t length = static_cast<size_t>(curve_length);
  const size_t num_columns = curves.size() / length;
  std::vector<Segment> segments = Hulls(curves, length, num_columns, num_threads);
  // Rates fall along a column's hull, so a stable sort keeps its segments in order even where two
  // rates round to the same float.
  std::stable_sort(segments.begin(), segments.end(), ByRate);

  std::vector<int32_t> records(num_columns, 0);
  std::vector<bool> closed(num_columns, false);
  for (const Segment& segment : segments) {
    if (budget == 0 || static_cast<double>(segment.rate) <= least_benefit) break;
    const size_t column = static_cast<size_t>(segment.column);
    if (closed[column]) continue;
    if (segment.length > budget) {
      closed[column] = true;
      continue;
    }
    records[column] += segment.length;
    budget -= segment.length;
  }
  SpendRest(curves, length, budget, static_cast<float>(least_benefit), &records);
  return records;
}

}  // namespace flashquant
