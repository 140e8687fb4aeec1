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
  static constexpr int kSharedBit = 2;     // four bits each
  static constexpr int kPartBit = 6;
  static constexpr int kPartsBit = 10;
  static constexpr int kStripBit = 14;

  int32_t unit = 0;    // local: strip by strip
  int32_t packed = 0;  // what the functions give, from the bits above

  FQ_HOST_DEVICE int strip() const { return packed >> kStripBit; }  // local
  FQ_HOST_DEVICE bool cut() const { return (packed & kCut) != 0; }
  FQ_HOST_DEVICE bool first_cut() const { return (packed & kFirstCut) != 0; }
  // Of a cut: the strip among the block's shared ones, the part of it that begins here, and how
  // many warps have a part, be it without a unit. A first cut begins part 1.
  FQ_HOST_DEVICE int shared_strip() const { return packed >> kSharedBit & 15; }
  FQ_HOST_DEVICE int part() const { return packed >> kPartBit & 15; }
  FQ_HOST_DEVICE int num_parts() const { return packed >> kPartsBit & 15; }
};

// By warp, then the end of the last run.
struct RunTable {
  RunBegin begin[kMaxWarpsPerBlock + 1];
};

// For a block of `num_strips` strips of `num_units` units.
inline RunTable CutRuns(int num_strips, int num_units, int num_warps) {
  RunTable runs = {};
  int num_shared = 0;
  for (int warp = 0; warp <= num_warps; ++warp) {
    const int strip = num_strips * warp / num_warps;
    const int rest = num_strips * warp % num_warps;
    RunBegin& begin = runs.begin[warp];
    begin.unit = strip * num_units + rest * num_units / num_warps;
    begin.packed = strip << RunBegin::kStripBit;
    if (rest == 0) continue;
    begin.packed |= RunBegin::kCut;
    const int first_cut = strip * num_warps / num_strips + 1;
    const int last_cut = ((strip + 1) * num_warps - 1) / num_strips;
    if (warp == first_cut) {
      begin.packed |= RunBegin::kFirstCut;
      ++num_shared;
    }
    begin.packed |= (num_shared - 1) << RunBegin::kSharedBit;
    begin.packed |= (warp - first_cut + 1) << RunBegin::kPartBit;
    begin.packed |= (last_cut - first_cut + 2) << RunBegin::kPartsBit;
  }
  return runs;
}

}  // namespace flashquant::cuda
