// How a block's units are cut into one run per warp: worked out on the host for all blocks, because
// every warp needs two beginnings before its first copy and a kernel's own divisions take longer.
#pragma once

#include <cstdint>

#include "kernels/cuda/linear_w4a16/plan.h"
#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

// Where a warp's run of its block's local units begins. The strips are cut evenly, so that all
// ranks agree which are whole whatever their number of units.
struct alignas(8) RunBegin {
  static constexpr int32_t kCut = 1;       // inside a strip, which is then shared
  static constexpr int32_t kFirstCut = 2;  // and before all other cuts of that strip

  int32_t unit = 0;             // local: strip by strip
  int32_t strip_and_flags = 0;  // four times the local strip

  FQ_HOST_DEVICE int strip() const { return strip_and_flags >> 2; }
  FQ_HOST_DEVICE bool cut() const { return (strip_and_flags & kCut) != 0; }
  FQ_HOST_DEVICE bool first_cut() const { return (strip_and_flags & kFirstCut) != 0; }
};

// By warp, then the end of the last run.
struct RunTable {
  RunBegin begin[kMaxWarpsPerBlock + 1];
};

// For a block of `num_strips` strips of `num_units` units.
inline RunTable CutRuns(int num_strips, int num_units, int num_warps) {
  RunTable runs = {};
  for (int warp = 0; warp <= num_warps; ++warp) {
    const int strip = num_strips * warp / num_warps;
    const int rest = num_strips * warp % num_warps;
    RunBegin& begin = runs.begin[warp];
    begin.unit = strip * num_units + rest * num_units / num_warps;
    begin.strip_and_flags = 4 * strip;
    if (rest != 0) begin.strip_and_flags |= RunBegin::kCut;
    // The warp before begins num_strips / num_warps of a strip earlier.
    if (rest != 0 && rest <= num_strips) begin.strip_and_flags |= RunBegin::kFirstCut;
  }
  return runs;
}

}  // namespace flashquant::cuda
