// BFloat16 and Half as storage types with conversions to and from float.
//
// Plain host code, round to nearest even; NaN stays NaN. SIMD conversions live in the kernels that
// need them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace flashquant {

struct BFloat16 {
  uint16_t bits = 0;
  friend constexpr bool operator==(BFloat16, BFloat16) = default;
};

struct Half {
  uint16_t bits = 0;
  friend constexpr bool operator==(Half, Half) = default;
};

constexpr float ToFloat(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

constexpr BFloat16 ToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) >
      0x7f800000u) {  // NaN: keep it quiet, do not let rounding carry it to infinity
    return {static_cast<uint16_t>((bits >> 16) | 0x0040u)};
  }
  const uint32_t round = 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>((bits + round) >> 16)};
}

constexpr float ToFloat(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // Zero and subnormals: mantissa * 2^-24, exact in float.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

constexpr Half ToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u)
    return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds beyond 65504
  if (magnitude <
      0x38800000u) {  // below 2^-14: subnormal half; adding 0.5 aligns and rounds the mantissa
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u))};
  }
  const uint32_t round = 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + round) >> 13))};
}

inline bool IsFinite(BFloat16 value) { return (value.bits & 0x7f80u) != 0x7f80u; }

}  // namespace flashquant
