// TensorSource: named tensors to read, whatever the container (Hugging Face folder or GGUF file).
//
// What the tensors mean is not known here: quantized_tensors.h and the model loader know.
#pragma once

#include <cstdint>
#include <optional>
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
  // The bytes come from no file but are made when they are asked for: nothing is compared.
  virtual bool IsGenerated() const { return false; }
  // Its CRC-32C as the file states it; nullopt when the file has none. A call for the whole of a
  // tensor that IsCheckedAtLoad names compares it.
  virtual std::optional<uint32_t> StoredChecksum(const TensorInfo& tensor) const;
  // Reads the tensor in pieces and compares its CRC-32C with the stored one; OK without reading
  // when there is none. DATA_LOSS "checksum" otherwise. (`flashquant inspect --verify`.)
  absl::Status VerifyChecksum(const TensorInfo& tensor) const;
  // Copies rows [first_row, first_row + num_rows) of the tensor to `out` (its bytes as `dtype`,
  // row-major). DATA_LOSS when the file is shorter than it was or its checksum is wrong.
  virtual absl::Status ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                                void* out) const = 0;
  absl::Status Read(const TensorInfo& tensor, void* out) const {
    return ReadRows(tensor, 0, tensor.num_rows(), out);
  }
  // The whole tensor as bytes. DATA_LOSS "missing tensor" when it is not there.
  absl::StatusOr<std::vector<uint8_t>> ReadBytes(std::string_view name) const;
  // Rows of a floating-point tensor (F32, F16, BF16) converted to float. DATA_LOSS for another
  // dtype.
  absl::Status ReadRowsAsFloat(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                               float* out) const;
};

// Tensors whose checksum is compared at every load: scales, zero points and the three outlier
// tensors of a quantized layer, scales of 8-bit tables (design "Tile-COO format").
bool IsCheckedAtLoad(std::string_view tensor_name);

}  // namespace flashquant
