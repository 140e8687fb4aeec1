#include "engine/quantize/density_budget.h"

#include <algorithm>
#include <array>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr std::array kDensities = {0.0,  0.0025, 0.005, 0.0075, 0.01, 0.015,
                                   0.02, 0.03,   0.045, 0.06,   0.08, 0.11};

// `length` more records of a curve, each lowering the error by `rate`.
struct Segment {
  double rate = 0;
  size_t curve = 0;
  int64_t length = 0;
};

// The lower convex hull, falling part only: rates fall along it.
void AppendHull(const LayerCurve& curve, size_t index, std::vector<Segment>* segments) {
  size_t at = 0;
  while (at + 1 < curve.records.size()) {
    double best_rate = 0;
    size_t best_end = at;
    for (size_t end = at + 1; end < curve.records.size(); ++end) {
      const int64_t length = curve.records[end] - curve.records[at];
      if (length <= 0) continue;
      const double rate = (curve.error[at] - curve.error[end]) / static_cast<double>(length);
      if (rate > best_rate) {
        best_rate = rate;
        best_end = end;
      }
    }
    if (best_end == at) return;
    segments->push_back({best_rate, index, curve.records[best_end] - curve.records[at]});
    at = best_end;
  }
}

int64_t BytesOf(const PlannedTensor& planned, const TensorInfo& source, int64_t group_size,
                bool symmetric) {
  int64_t count = 1;
  for (const int64_t dim : source.shape) count *= dim;
  switch (planned.action) {
    case TensorAction::kInt4: {
      const int64_t n = PaddedN(planned.n);
      const int64_t k = PaddedK(planned.k, group_size);
      const int64_t groups = group_size == -1 ? 1 : k / group_size;
      return n * (k / 2 + groups * (symmetric ? 2 : 3));
    }
    case TensorAction::kInt8:
      return count + 2 * planned.n;
    case TensorAction::kBFloat16:
      return 2 * count;
    case TensorAction::kCopy:
      return source.num_bytes;
  }
  return 0;
}

}  // namespace

std::span<const double> MeasuredDensities() { return kDensities; }

std::vector<int64_t> ShareRecords(std::span<const LayerCurve> curves, int64_t budget) {
  std::vector<Segment> segments;
  for (size_t i = 0; i < curves.size(); ++i) AppendHull(curves[i], i, &segments);
  std::stable_sort(segments.begin(), segments.end(),
                   [](const Segment& a, const Segment& b) { return a.rate > b.rate; });
  std::vector<int64_t> records(curves.size(), 0);
  for (const Segment& segment : segments) {
    const int64_t taken = std::min(segment.length, budget);
    records[segment.curve] += taken;
    budget -= taken;
    if (budget == 0) break;
  }
  return records;
}

absl::StatusOr<int64_t> RecordsThatFit(const QuantizePlan& plan, const TensorSource& tensors,
                                       bool symmetric, const TileCooGeometry& geometry,
                                       int64_t target_bytes) {
  int64_t num_bytes = 0;
  for (const PlannedTensor& planned : plan.tensors) {
    num_bytes += BytesOf(planned, *tensors.Find(planned.source), plan.group_size, symmetric);
    if (planned.action != TensorAction::kInt4) continue;
    TileCooGeometry tiles = geometry;
    tiles.n = planned.n;
    tiles.k = planned.k;
    num_bytes += 4 * (tiles.num_tiles() + 1) + 4 * tiles.num_tiles() * tiles.buckets_per_tile;
  }
  if (num_bytes > target_bytes) {
    return InvalidArgumentError(
        "--target-size: the tensors take {} bytes without any outlier (got {})", num_bytes,
        target_bytes);
  }
  return (target_bytes - num_bytes) / static_cast<int64_t>(sizeof(TileCooRecord));
}

}  // namespace flashquant
