// What the benchmarks of a GPU say in a build without CUDA.
#pragma once

namespace flashquant::bench {

inline constexpr char kNoCuda[] =
    "this program was built without CUDA (README, \"Use\": the preset cuda; figures 9, 10 and 12 "
    "of "
    "bench kernel need no GPU)";

}  // namespace flashquant::bench
