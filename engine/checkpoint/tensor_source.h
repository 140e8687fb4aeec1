// TensorSource: named tensors to read, whatever the container (Hugging Face folder or GGUF file).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"

namespace flashquant {

struct TensorInfo {
  std::string name;            // Hugging Face's name, also for GGUF
  DType dtype = DType::kF32;   // as Read delivers it (a GGUF block type reads as F32)
  std::vector<int64_t> shape;  // [rows, columns] as Hugging Face stores it
  int64_t num_bytes = 0;       // of the whole tensor as delivered; product and size are checked

  int64_t num_rows() const { return shape.empty() ? 1 : shape[0]; }
};

// Safe from several threads at once.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // All tensors, sorted by name.
  virtual const std::vector<TensorInfo>& tensors() const = 0;
  // nullptr when there is no such tensor.
  const TensorInfo* Find(std::string_view name) const;
  // Copies rows [first_row, first_row + num_rows) of the tensor to `out` (its bytes as `dtype`,
  // row-major). DATA_LOSS when the file is shorter than it was or its checksum is wrong.
  virtual absl::Status ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                                void* out) const = 0;
  absl::Status Read(const TensorInfo& tensor, void* out) const {
    return ReadRows(tensor, 0, tensor.num_rows(), out);
  }
  // The whole tensor as bytes; NOT_FOUND... DATA_LOSS "missing tensor" when it is not there.
  absl::StatusOr<std::vector<uint8_t>> ReadBytes(std::string_view name) const;
  // Rows of a floating-point tensor (F32, F16, BF16) converted to float. DATA_LOSS for another
  // dtype.
  absl::Status ReadRowsAsFloat(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                               float* out) const;
};

}  // namespace flashquant
