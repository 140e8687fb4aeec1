// The rate at which this machine's GPU reads its memory: what a benchmark of memory-bound work is
// held against.
#pragma once

namespace flashquant::bench {

// Of a long stream, in GB/s; 0 where there is no GPU or no CUDA in this build.
double StreamGigabytesPerSecond();

}  // namespace flashquant::bench
