// FP8 (e4m3) by its definition: every finite value spelt out, the nearest one found by looking at
// all of them. Shares no code with kernels/base/float8.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace flashquant {

// The value of a code: sign, exponent with bias 7, mantissa of 3 bits; NaN when all seven are set.
inline double ReferenceFloat8Value(int code) {
  const int exponent = code / 8 % 16;
  const int mantissa = code % 8;
  const double sign = code >= 128 ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa / 8.0, -6);
  return sign * std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
}

// The code of the nearest value, of two equally near ones the even code; the sign is kept.
inline int ReferenceFloat8Code(double value) {
  int best = 0;
  double best_distance = std::numeric_limits<double>::infinity();
  for (int code = 0; code < 127; ++code) {
    const double distance = std::fabs(std::fabs(value) - ReferenceFloat8Value(code));
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
      best_distance = distance;
    }
  }
  return std::signbit(value) ? best + 128 : best;
}

inline double ReferenceFloat8Nearest(double value) {
  return ReferenceFloat8Value(ReferenceFloat8Code(value));
}

}  // namespace flashquant
