// Float8E4M3, the element type of an FP8 KV cache: sign, 4 bits of exponent (bias 7), 3 of
// mantissa; no infinities, one NaN of each sign. Greatest value 448, least normal one 2^-6, least
// 2^-9.
//
// Plain host code; SIMD and device conversions live in the kernels that need them and agree with
// this bit by bit. Source: "OCP 8-bit Floating Point Specification (OFP8)", 2023.
#pragma once

#include <bit>
#include <cstdint>

namespace flashquant {

struct Float8E4M3 {
  uint8_t bits = 0;
  friend constexpr bool operator==(Float8E4M3, Float8E4M3) = default;
};

inline constexpr float kMaxFloat8E4M3 = 448.0f;
inline constexpr uint8_t kFloat8E4M3Nan = 0x7f;

constexpr float ToFloat(Float8E4M3 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80u) << 24;
  const uint32_t magnitude = value.bits & 0x7fu;
  if (magnitude == kFloat8E4M3Nan) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude >= 8) return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
  // Zero and subnormals: mantissa * 2^-9, exact in float.
  const float size = static_cast<float>(magnitude) * 0x1p-9f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(size));
}

// Rounds to nearest even; a finite value beyond +-448 becomes +-448. What is not finite becomes NaN
// (Deviation: the specification's saturating conversion makes 448 of infinity), so that a step that
// went wrong is not hidden by its cache.
constexpr Float8E4M3 ToFloat8E4M3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) return {static_cast<uint8_t>(sign | kFloat8E4M3Nan)};
  constexpr uint32_t kMaxBits = std::bit_cast<uint32_t>(kMaxFloat8E4M3);
  if (magnitude > kMaxBits) magnitude = kMaxBits;
  uint32_t code = 0;
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {
    // Subnormal: adding 2^14, whose last bit is worth 2^-9, aligns and rounds the mantissa.
    const float aligned = std::bit_cast<float>(magnitude) + 0x1p14f;
    code = std::bit_cast<uint32_t>(aligned) - std::bit_cast<uint32_t>(0x1p14f);
  } else {
    const uint32_t round = 0x7ffffu + ((magnitude >> 20) & 1u);
    code = ((magnitude + round) >> 20) - (120u << 3);
  }
  return {static_cast<uint8_t>(sign | code)};
}

}  // namespace flashquant
