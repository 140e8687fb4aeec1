#include "engine/quantize/quantized_matrix.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "engine/quantize/parallel_for.h"
#include "kernels/base/check.h"
#include "kernels/base/math_util.h"

namespace flashquant {
namespace {

constexpr int64_t kRowsPerTask = 32;

// Packs the codes of a row; where `code_at` says kOutlierCode stands the zero point, so that the
// dense part gives 0 there.
template <typename CodeAt>
void PackRow(int64_t row, int64_t k, std::span<const uint8_t> zeros, const CodeAt& code_at,
             Int4Weight* weight) {
  const uint8_t* row_zeros = zeros.data() + row * weight->groups_per_row();
  uint8_t* packed = weight->qweight.data() + row * (weight->k_padded / 2);
  for (int64_t i = 0; i < weight->k_padded; ++i) {
    uint8_t code = i < k ? code_at(i) : kOutlierCode;
    if (code == kOutlierCode) code = row_zeros[i / weight->group_size];
    packed[i / 2] = static_cast<uint8_t>(i % 2 == 0 ? code : packed[i / 2] | code << 4);
  }
}

// Without codes and zero points.
Int4Weight EmptyWeight(int64_t n, int64_t k, int64_t group_size, bool symmetric,
                       std::span<const GroupParams> params, std::vector<uint8_t>* zeros) {
  Int4Weight weight;
  const int64_t groups_per_row = CeilDiv(k, group_size);
  weight.n = n;
  weight.k = k;
  weight.n_padded = RoundUp<int64_t>(n, 8);
  weight.group_size = group_size;
  weight.k_padded = groups_per_row * group_size;
  weight.symmetric = symmetric;
  weight.scales.assign(static_cast<size_t>(weight.n_padded * groups_per_row), BFloat16{});
  zeros->assign(weight.scales.size(), 8);
  weight.qweight.assign(static_cast<size_t>(weight.n_padded * weight.k_padded / 2), 0x88);
  for (size_t i = 0; i < params.size(); ++i) {
    weight.scales[i] = params[i].scale;
    (*zeros)[i] = params[i].zero;
  }
  return weight;
}

// Calls body(row, slots of the row's task) for all rows and joins the slots.
template <typename Body>
std::vector<TileCooSlot> ForRows(int64_t n, int num_threads, const Body& body) {
  std::vector<std::vector<TileCooSlot>> parts(static_cast<size_t>(CeilDiv(n, kRowsPerTask)));
  ParallelFor(num_threads, n, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      body(row, &parts[static_cast<size_t>(begin / kRowsPerTask)]);
    }
  });
  std::vector<TileCooSlot> slots;
  for (const std::vector<TileCooSlot>& part : parts) {
    slots.insert(slots.end(), part.begin(), part.end());
  }
  return slots;
}

void AddSlot(int64_t row, int64_t k, BFloat16 value, std::vector<TileCooSlot>* slots) {
  if ((value.bits & 0x7fffu) == 0) return;
  slots->push_back({static_cast<int32_t>(k), static_cast<int32_t>(row), value.bits});
}

}  // namespace

QuantizedMatrix MakeQuantizedMatrix(const MatrixState& state, int num_threads) {
  QuantizedMatrix result;
  std::vector<uint8_t> zeros;
  result.weight =
      EmptyWeight(state.n, state.k, state.group_size, state.symmetric, state.params, &zeros);
  result.outliers = ForRows(state.n, num_threads, [&](int64_t row, auto* slots) {
    const size_t first = static_cast<size_t>(row * state.k);
    const auto code_at = [&](int64_t i) {
      const size_t at = first + static_cast<size_t>(i);
      if (state.mask[at] == 0) return state.codes[at];
      AddSlot(row, i, ToBFloat16(state.values[at]), slots);
      return kOutlierCode;
    };
    PackRow(row, state.k, zeros, code_at, &result.weight);
  });
  if (!state.symmetric) result.weight.zeros = std::move(zeros);
  return result;
}

QuantizedMatrix MakeQuantizedMatrix(const RowsProblem& problem, const SolvedRows& rows,
                                    int num_threads) {
  QuantizedMatrix result;
  std::vector<uint8_t> zeros;
  result.weight =
      EmptyWeight(problem.n, problem.k, problem.group_size, problem.symmetric, rows.params, &zeros);
  // Where each row's outliers begin.
  std::vector<size_t> first_outlier(static_cast<size_t>(problem.n) + 1, 0);
  ParallelFor(num_threads, problem.n, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto codes = rows.codes.begin() + row * problem.k;
      first_outlier[static_cast<size_t>(row) + 1] =
          static_cast<size_t>(std::count(codes, codes + problem.k, kOutlierCode));
    }
  });
  std::partial_sum(first_outlier.begin(), first_outlier.end(), first_outlier.begin());
  FQ_CHECK(first_outlier.back() == rows.outliers.size());
  result.outliers = ForRows(problem.n, num_threads, [&](int64_t row, auto* slots) {
    size_t next = first_outlier[static_cast<size_t>(row)];
    const auto code_at = [&](int64_t i) {
      const uint8_t code = rows.codes[static_cast<size_t>(row * problem.k + i)];
      if (code == kOutlierCode) AddSlot(row, i, rows.outliers[next++], slots);
      return code;
    };
    PackRow(row, problem.k, zeros, code_at, &result.weight);
  });
  if (!problem.symmetric) result.weight.zeros = std::move(zeros);
  return result;
}

std::vector<float> Dequantize(const QuantizedMatrix& matrix, int num_threads) {
  const Int4Weight& weight = matrix.weight;
  std::vector<float> dense(static_cast<size_t>(weight.n * weight.k));
  ParallelFor(num_threads, weight.n, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t k = 0; k < weight.k; ++k) {
        const int64_t group = k / weight.group_size;
        dense[static_cast<size_t>(row * weight.k + k)] =
            ToFloat(weight.scales[static_cast<size_t>(row * weight.groups_per_row() + group)]) *
            static_cast<float>(weight.Code(row, k) - weight.ZeroPoint(row, group));
      }
    }
  });
  for (const TileCooSlot& slot : matrix.outliers) {
    dense[static_cast<size_t>(int64_t{slot.n} * weight.k + slot.k)] +=
        ToFloat(BFloat16{slot.value_bits});
  }
  return dense;
}

}  // namespace flashquant
