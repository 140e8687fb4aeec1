// 8-bit tables (embedding, head): one BF16 scale per row, codes -127..127.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/bfloat16.h"

namespace flashquant {

// codes: as many as `row`, finite weights. Returns the scale (value = scale * code) that gives the
// least sum of squared errors among those near max / 127.
BFloat16 QuantizeTableRow(std::span<const float> row, std::span<int8_t> codes);

}  // namespace flashquant
