// Time of launches inside a CUDA graph, and of a plain streaming read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

namespace flashquant::bench {

inline constexpr int kTimedReplays = 25;

struct GraphTiming {
  int min_launches = 24;  // of a graph
  int replays = kTimedReplays;
};

// Median microseconds per launch of a graph that calls launch(0), ... launch(copies - 1) in order,
// at least min_launches times in all. 0 after an error, which device_memory.cuh keeps; `launch`
// returning false is none, but ends the measurement.
double TimeGraph(int copies, const std::function<bool(int, cudaStream_t)>& launch,
                 const GraphTiming& timing = {});

// A read of `bytes` from cold memory by the best of a few grids.
double TimeStream(int64_t bytes);

}  // namespace flashquant::bench
