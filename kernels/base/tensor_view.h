// A non-owning view of a dense row-major tensor on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/dtype.h"

namespace flashquant {

// `data` must outlive the view. Shapes are true sizes, last dimension contiguous.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;

  int64_t NumElements() const {
    int64_t n = 1;
    for (int64_t dim : shape) n *= dim;
    return n;
  }
  template <typename T>
  const T* As() const {
    return static_cast<const T*>(data);
  }
};

}  // namespace flashquant
