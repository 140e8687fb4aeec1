// Two FP8 (e4m3) numbers to two FP16 ones by integer arithmetic, where a GPU has no instruction for
// it (before sm_89). Plain C++, so that tests on the host try every pair.
#pragma once

#include <cstdint>

#include "kernels/cuda/primitives/host_device.h"

namespace flashquant::cuda {

// What the FP16 numbers of HalvesFromFp8 are too small by.
inline constexpr float kFp8HalfFactor = 256.0f;

// `codes`: one in each upper byte of the two halves, lower bytes 0. The bits of two FP16 numbers,
// each 1 / kFp8HalfFactor of the code's value, exactly: exponent and mantissa keep their bits, one
// place further down, under a bias that is 8 greater. NaN stays NaN.
FQ_HOST_DEVICE inline uint32_t HalvesFromFp8(uint32_t codes) {
  const uint32_t halves = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
  const uint32_t nan = ((codes & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
  return nan == 0 ? halves : halves | (nan >> 15) * 0x7e00u;
}

}  // namespace flashquant::cuda
