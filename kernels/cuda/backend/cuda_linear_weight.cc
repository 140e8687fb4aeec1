#include "kernels/cuda/backend/cuda_linear_weight.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant::cuda {
namespace {

constexpr int64_t kStagedElements = int64_t{1} << 21;  // rows converted before they are copied

struct Outlier {
  int64_t n = 0;
  int64_t k = 0;
  float value = 0.0f;
};

// Sorted by row.
absl::StatusOr<std::vector<Outlier>> CollectOutliers(const LinearPart& part) {
  std::vector<Outlier> outliers;
  if (part.outliers == nullptr) return outliers;
  const TileCooGeometry& geometry = part.outliers->geometry();
  if (geometry.value_type != TileCooValueType::kBFloat16) {
    return UnimplementedError("outlier values are FP16; the CUDA backend takes BF16");
  }
  outliers.reserve(static_cast<size_t>(part.outliers->num_slots()));
  part.outliers->ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
    outliers.push_back({n, k, TileCooValue(geometry.value_type, bits)});
  });
  std::sort(outliers.begin(), outliers.end(), [](const Outlier& a, const Outlier& b) {
    return std::tie(a.n, a.k) < std::tie(b.n, b.k);
  });
  return outliers;
}

void ReadInt4Row(const Int4Weight& weight, int64_t row, std::span<float> out) {
  for (int64_t k = 0; k < weight.k; ++k) {
    const int64_t group = k / weight.group_size;
    const float scale =
        ToFloat(weight.scales[static_cast<size_t>(row * weight.groups_per_row() + group)]);
    out[static_cast<size_t>(k)] =
        scale * static_cast<float>(weight.Code(row, k) - weight.ZeroPoint(row, group));
  }
}

void ReadDenseRow(const LinearPart& part, int64_t row, std::span<float> out) {
  const TensorView& dense = part.dense;
  const int64_t first = row * part.k();
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t index = first + static_cast<int64_t>(i);
    switch (dense.dtype) {
      case DType::kBF16:
        out[i] = ToFloat(dense.As<BFloat16>()[index]);
        break;
      case DType::kF16:
        out[i] = ToFloat(dense.As<Half>()[index]);
        break;
      case DType::kI8:
        out[i] = ToFloat(part.row_scales[row]) * static_cast<float>(dense.As<int8_t>()[index]);
        break;
      default:
        out[i] = dense.As<float>()[index];
    }
  }
}

// Converts a part row by row and copies it to its rows of the matrix.
absl::Status CopyPart(const LinearPart& part, int64_t first_row, Backend* backend, void* matrix) {
  const int64_t k = part.k();
  if (part.int4 == nullptr && part.dense.dtype == DType::kBF16) {
    return backend->CopyToDevice(static_cast<BFloat16*>(matrix) + first_row * k, part.dense.data,
                                 part.n() * k * int64_t{sizeof(BFloat16)});
  }
  FQ_ASSIGN_OR_RETURN(const std::vector<Outlier> outliers, CollectOutliers(part));
  const int64_t rows_at_once = std::clamp<int64_t>(kStagedElements / k, 1, part.n());
  std::vector<float> row_values(static_cast<size_t>(k));
  std::vector<BFloat16> staged(static_cast<size_t>(rows_at_once * k));
  auto outlier = outliers.begin();
  for (int64_t begin = 0; begin < part.n(); begin += rows_at_once) {
    const int64_t end = std::min(begin + rows_at_once, part.n());
    for (int64_t row = begin; row < end; ++row) {
      if (part.int4 != nullptr) {
        ReadInt4Row(*part.int4, row, row_values);
      } else {
        ReadDenseRow(part, row, row_values);
      }
      for (; outlier != outliers.end() && outlier->n == row; ++outlier) {
        row_values[static_cast<size_t>(outlier->k)] += outlier->value;
      }
      std::transform(row_values.begin(), row_values.end(), staged.begin() + (row - begin) * k,
                     [](float value) { return ToBFloat16(value); });
    }
    constexpr int64_t kElementBytes = sizeof(BFloat16);
    FQ_RETURN_IF_ERROR(backend->CopyToDevice(
        static_cast<uint8_t*>(matrix) + (first_row + begin) * k * kElementBytes, staged.data(),
        (end - begin) * k * kElementBytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DeviceBuffer> CopyBias(std::span<const LinearPart> parts, int64_t n,
                                      Backend* backend) {
  if (std::all_of(parts.begin(), parts.end(),
                  [](const LinearPart& part) { return part.bias == nullptr; })) {
    return DeviceBuffer();
  }
  std::vector<BFloat16> bias;
  for (const LinearPart& part : parts) {
    if (part.bias != nullptr) bias.insert(bias.end(), part.bias, part.bias + part.n());
    if (part.bias == nullptr) bias.resize(bias.size() + static_cast<size_t>(part.n()));
  }
  const int64_t num_bytes = n * int64_t{sizeof(BFloat16)};
  FQ_ASSIGN_OR_RETURN(DeviceBuffer buffer, backend->Allocate(num_bytes));
  FQ_RETURN_IF_ERROR(backend->CopyToDevice(buffer.data(), bias.data(), num_bytes));
  return buffer;
}

absl::StatusOr<std::unique_ptr<CudaLinearWeight>> MakeDenseWeight(std::span<const LinearPart> parts,
                                                                  Backend* backend) {
  FQ_RETURN_IF_ERROR(CheckLinearParts(parts));
  const int64_t k = parts[0].k();
  int64_t n = 0;
  bool is_table = true;
  for (const LinearPart& part : parts) {
    n += part.n();
    is_table = is_table && part.int4 == nullptr;
  }
  const int64_t num_bytes = n * k * int64_t{sizeof(BFloat16)};
  FQ_ASSIGN_OR_RETURN(DeviceBuffer matrix, backend->Allocate(num_bytes));
  int64_t first_row = 0;
  for (const LinearPart& part : parts) {
    FQ_RETURN_IF_ERROR(CopyPart(part, first_row, backend, matrix.data()));
    first_row += part.n();
  }
  FQ_ASSIGN_OR_RETURN(DeviceBuffer bias, CopyBias(parts, n, backend));
  return std::make_unique<CudaLinearWeight>(n, k, std::move(matrix), std::move(bias), is_table);
}

}  // namespace flashquant::cuda
