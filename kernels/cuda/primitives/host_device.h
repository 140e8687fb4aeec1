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

}  // namespace flashquant::cuda
