// See stream_rate.h: a build without CUDA.
#include "kernels/bench/stream_rate.h"

namespace flashquant::bench {

double StreamGigabytesPerSecond() { return 0; }

}  // namespace flashquant::bench
