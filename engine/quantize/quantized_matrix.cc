#include "engine/quantize/quantized_matrix.h"

#include <utility>

#include "kernels/base/math_util.h"

namespace flashquant {

QuantizedMatrix MakeQuantizedMatrix(const MatrixState& state) {
  QuantizedMatrix result;
  Int4Weight& weight = result.weight;
  const int64_t groups_per_row = state.groups_per_row();
  weight.n = state.n;
  weight.k = state.k;
  weight.n_padded = RoundUp<int64_t>(state.n, 8);
  weight.group_size = state.group_size;
  weight.k_padded = groups_per_row * state.group_size;
  weight.symmetric = state.symmetric;
  weight.scales.assign(static_cast<size_t>(weight.n_padded * groups_per_row), BFloat16{});
  std::vector<uint8_t> zeros(weight.scales.size(), 8);
  weight.qweight.assign(static_cast<size_t>(weight.n_padded * weight.k_padded / 2), 0x88);
  for (size_t i = 0; i < state.params.size(); ++i) {
    weight.scales[i] = state.params[i].scale;
    zeros[i] = state.params[i].zero;
  }
  for (int64_t row = 0; row < state.n; ++row) {
    uint8_t* packed = weight.qweight.data() + row * (weight.k_padded / 2);
    for (int64_t k = 0; k < weight.k_padded; ++k) {
      uint8_t code = zeros[static_cast<size_t>(row * groups_per_row + k / state.group_size)];
      const size_t at = static_cast<size_t>(row * state.k + k);
      if (k < state.k && state.mask[at] == 0) {
        code = state.codes[at];
      } else if (k < state.k) {
        const BFloat16 value = ToBFloat16(state.values[at]);
        if ((value.bits & 0x7fffu) != 0) {
          result.outliers.push_back(
              {static_cast<int32_t>(k), static_cast<int32_t>(row), value.bits});
        }
      }
      packed[k / 2] = static_cast<uint8_t>(k % 2 == 0 ? code : packed[k / 2] | code << 4);
    }
  }
  if (!state.symmetric) weight.zeros = std::move(zeros);
  return result;
}

std::vector<float> Dequantize(const QuantizedMatrix& matrix) {
  const Int4Weight& weight = matrix.weight;
  std::vector<float> dense(static_cast<size_t>(weight.n * weight.k));
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t k = 0; k < weight.k; ++k) {
      const int64_t group = k / weight.group_size;
      dense[static_cast<size_t>(row * weight.k + k)] =
          ToFloat(weight.scales[static_cast<size_t>(row * weight.groups_per_row() + group)]) *
          static_cast<float>(weight.Code(row, k) - weight.ZeroPoint(row, group));
    }
  }
  for (const TileCooSlot& slot : matrix.outliers) {
    dense[static_cast<size_t>(int64_t{slot.n} * weight.k + slot.k)] +=
        ToFloat(BFloat16{slot.value_bits});
  }
  return dense;
}

}  // namespace flashquant
