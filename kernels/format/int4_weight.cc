// Checks of an INT4 weight that came from a file, or that the quantizer is about to write.
#include "kernels/format/int4_weight.h"

#include <limits>
#include <optional>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

absl::Status CheckShape(const Int4Weight& weight) {
  constexpr int64_t kMaxDimension = std::numeric_limits<int32_t>::max();
  if (weight.n < 1 || weight.n > kMaxDimension || weight.k < 1 || weight.k > kMaxDimension) {
    return DataLossError("int4: shape N {} K {}, allowed 1..{}", weight.n, weight.k, kMaxDimension);
  }
  if (weight.n_padded != RoundUp<int64_t>(weight.n, 8)) {
    return DataLossError("int4: N {} padded to {}, the next multiple of 8 is {}", weight.n,
                         weight.n_padded, RoundUp<int64_t>(weight.n, 8));
  }
  const int64_t group = weight.group_size;
  const bool grouped = (group == 32 || group == 64 || group == 128) &&
                       weight.k_padded == RoundUp<int64_t>(weight.k, group);
  const bool per_row = group == weight.k_padded && group == RoundUp<int64_t>(weight.k, 2);
  if (!grouped && !per_row) {
    return DataLossError(
        "int4: K {} padded to {} with group size {}, allowed groups of 32, 64, 128 with K padded "
        "to "
        "the next multiple, or one group per row with K padded to even",
        weight.k, weight.k_padded, group);
  }
  return absl::OkStatus();
}

absl::Status CheckArrays(const Int4Weight& weight) {
  const auto n_padded = static_cast<uint64_t>(weight.n_padded);
  // Both factors are below 2^32: no product wraps.
  const uint64_t code_bytes = n_padded * static_cast<uint64_t>(weight.k_padded / 2);
  const uint64_t num_groups = n_padded * static_cast<uint64_t>(weight.groups_per_row());
  if (weight.qweight.size() != code_bytes) {
    return DataLossError("int4: qweight has {} bytes, N {} K {} need {}", weight.qweight.size(),
                         weight.n_padded, weight.k_padded, code_bytes);
  }
  if (weight.scales.size() != num_groups) {
    return DataLossError("int4: {} scales, {} groups", weight.scales.size(), num_groups);
  }
  if (weight.zeros.size() != (weight.symmetric ? 0 : num_groups)) {
    return DataLossError("int4: {} zero points, {} groups need {} ({})", weight.zeros.size(),
                         num_groups, weight.symmetric ? 0 : num_groups,
                         weight.symmetric ? "symmetric" : "asymmetric");
  }
  return absl::OkStatus();
}

absl::Status CheckValues(const Int4Weight& weight) {
  const auto groups_per_row = static_cast<size_t>(weight.groups_per_row());
  for (size_t i = 0; i < weight.scales.size(); ++i) {
    if (!IsFinite(weight.scales[i])) {
      return DataLossError("int4: row {} group {}: scale {:#06x} is not finite", i / groups_per_row,
                           i % groups_per_row, weight.scales[i].bits);
    }
  }
  for (size_t i = 0; i < weight.zeros.size(); ++i) {
    if (weight.zeros[i] > 15) {
      return DataLossError("int4: row {} group {}: zero point {} (limit 15)", i / groups_per_row,
                           i % groups_per_row, weight.zeros[i]);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPadding(const Int4Weight& weight) {
  const int64_t groups_per_row = weight.groups_per_row();
  for (int64_t n = 0; n < weight.n_padded; ++n) {
    const bool padding_row = n >= weight.n;
    for (int64_t g = 0; padding_row && g < groups_per_row; ++g) {
      if (ToFloat(weight.scales[static_cast<size_t>(n * groups_per_row + g)]) != 0.0f) {
        return DataLossError("int4: padding row {} group {}: scale is not 0", n, g);
      }
    }
    for (int64_t k = padding_row ? 0 : weight.k; k < weight.k_padded; ++k) {
      const int32_t zero_point = weight.ZeroPoint(n, k / weight.group_size);
      if (weight.Code(n, k) != zero_point) {
        return DataLossError("int4: padding code {} at n {} k {}, allowed the zero point {}",
                             weight.Code(n, k), n, k, zero_point);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateInt4Weight(const Int4Weight& weight) {
  FQ_RETURN_IF_ERROR(CheckShape(weight));
  FQ_RETURN_IF_ERROR(CheckArrays(weight));
  FQ_RETURN_IF_ERROR(CheckValues(weight));
  return CheckPadding(weight);
}

}  // namespace flashquant
