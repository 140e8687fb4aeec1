// Integer helpers: rounding, and arithmetic on sizes from outside that cannot wrap.
#pragma once

#include <cstdint>
#include <optional>

namespace flashquant {

// a / b rounded up; a >= 0, b > 0.
template <typename T>
constexpr T CeilDiv(T a, T b) {
  return static_cast<T>(a / b + (a % b != 0 ? 1 : 0));
}

// The least multiple of b at or above a; a >= 0, b > 0. Must not overflow: use CheckedRoundUp on
// outside data.
template <typename T>
constexpr T RoundUp(T a, T b) {
  return static_cast<T>(CeilDiv(a, b) * b);
}

// nullopt when the result does not fit in 64 bits.
constexpr std::optional<uint64_t> CheckedMul(uint64_t a, uint64_t b) {
  uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

constexpr std::optional<uint64_t> CheckedAdd(uint64_t a, uint64_t b) {
  uint64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
  return result;
}

// The least multiple of b (> 0) at or above a, nullopt when it does not fit.
constexpr std::optional<uint64_t> CheckedRoundUp(uint64_t a, uint64_t b) {
  const uint64_t remainder = a % b;
  if (remainder == 0) return a;
  return CheckedAdd(a, b - remainder);
}

}  // namespace flashquant
