// Memory traffic of the fused kernel as NVIDIA's profiler counts it, beside the bytes that figure
// 12 counts itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/bench/kernel_bench.h"

namespace flashquant::bench {

// Bytes read from and written to device memory by one launch of the fused kernel with an empty
// cache: runs `program` ("flashquant bench kernel --no-baselines") under `ncu`. nullopt without
// ncu, a GPU or the right to read its counters. Takes seconds to minutes, by the layer's size.
std::optional<int64_t> ProfiledTraffic(const std::string& program, const KernelShape& shape, int m,
                                       double density);

// The sum of dram__bytes_read.sum and dram__bytes_write.sum in ncu's CSV, in bytes. nullopt when
// one is missing or not a number.
std::optional<int64_t> ParseProfiledTraffic(std::string_view csv);

}  // namespace flashquant::bench
