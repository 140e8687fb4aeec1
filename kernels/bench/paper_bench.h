// Times of the paper's own mapping (kernels/cuda/linear_paper/), step by step as its figure 11 has
// them; measured like everything in kernel_bench.h. A build without CUDA links
// paper_bench_none.cc.
#pragma once

#include <array>
#include <functional>
#include <string>

#include "kernels/bench/kernel_bench.h"

namespace flashquant::bench {

// Each has what the one before has.
enum class PaperStep : uint8_t {
  kTiling,      // one kernel, a warp's outliers after its codes
  kExtraWarps,  // warps for outliers alone
  kReordering,  // of columns over buckets and of elements against bank conflicts
};

inline constexpr std::array<PaperStep, 3> kPaperSteps = {PaperStep::kTiling, PaperStep::kExtraWarps,
                                                         PaperStep::kReordering};

// Calls `row` for every shape, density, step and m, in this order; only `us`, `bytes` and what was
// asked for are filled in. Of the options, those that name the problems and the shared memory
// count. False, with the first error, when something failed.
bool TimePaperKernels(const KernelBenchOptions& options,
                      const std::function<void(PaperStep, const KernelTiming&)>& row,
                      std::string* error);

}  // namespace flashquant::bench
