// Error curves of all groups of a matrix on the CPU: the search of int4_quantizer.h for each of
// them. The same on a GPU is kernels/cuda/quantize.
#pragma once

#include "kernels/quantizer_ops.h"

namespace flashquant {

// The same for any num_threads.
GroupCurves MakeGroupCurves(const CurveProblem& problem, int num_threads);

}  // namespace flashquant
