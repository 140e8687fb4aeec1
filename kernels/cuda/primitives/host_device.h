// Arithmetic that both the host and kernels do, in headers that plain C++ compilers read too.
#pragma once

#if defined(__CUDACC__)
#define FQ_HOST_DEVICE __host__ __device__
#else
#define FQ_HOST_DEVICE
#endif

namespace flashquant::cuda {

// `count` items in `parts` parts, the first ones one item longer.
struct EvenSplit {
  int quotient = 0;
  int remainder = 0;

  EvenSplit() = default;
  FQ_HOST_DEVICE EvenSplit(int count, int parts)
      : quotient(count / parts), remainder(count % parts) {}
  FQ_HOST_DEVICE int Begin(int part) const {
    return part * quotient + (part < remainder ? part : remainder);
  }
  FQ_HOST_DEVICE int Size(int part) const { return quotient + (part < remainder ? 1 : 0); }
};

// Division by a number that the host knows: a kernel's own division takes some 40 instructions.
// Exact while dividend * divisor is at most 2^32: for dividends below 2^20 and divisors up to 4096.
struct FastDivisor {
  unsigned divisor = 1;
  unsigned inverse = 0;  // 2^32 / divisor, rounded up; not used for 1

  FastDivisor() = default;
  explicit FastDivisor(int by)
      : divisor(static_cast<unsigned>(by)),
        inverse(by < 2 ? 0 : 0xffffffffu / static_cast<unsigned>(by) + 1) {}
#if defined(__CUDACC__)
  __device__ int Divide(int value) const {
    return divisor == 1 ? value : static_cast<int>(__umulhi(static_cast<unsigned>(value), inverse));
  }
#endif
};

}  // namespace flashquant::cuda
