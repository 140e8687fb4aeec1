// What the parts of the self-check share: inputs, buffers of either activation type, comparison.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

// Rounding to BF16 and the fused kernel's own share give up to 0.003; a wrong tile gives far more.
inline constexpr double kSelfCheckLimit = 0.02;

// Normal values, rounded to BF16, so that every backend sees the same ones.
inline std::vector<float> SelfCheckValues(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = ToFloat(ToBFloat16(normal(random)));
  return values;
}

template <typename T>
absl::StatusOr<DeviceBuffer> UploadAll(const std::vector<T>& host, Backend* backend) {
  const auto num_bytes = static_cast<int64_t>(host.size() * sizeof(T));
  FQ_ASSIGN_OR_RETURN(DeviceBuffer buffer, backend->Allocate(num_bytes));
  FQ_RETURN_IF_ERROR(backend->CopyToDevice(buffer.data(), host.data(), num_bytes));
  return buffer;
}

// In the backend's activation type.
inline absl::StatusOr<DeviceBuffer> UploadActivations(std::span<const float> values,
                                                      Backend* backend) {
  if (backend->info().activation_dtype == DType::kF32) {
    return UploadAll(std::vector<float>(values.begin(), values.end()), backend);
  }
  std::vector<BFloat16> rounded(values.size());
  for (size_t i = 0; i < values.size(); ++i) rounded[i] = ToBFloat16(values[i]);
  return UploadAll(rounded, backend);
}

inline absl::StatusOr<std::vector<float>> Download(const DeviceBuffer& buffer, size_t count,
                                                   DType dtype, Backend* backend) {
  std::vector<float> values(count);
  if (dtype == DType::kF32) {
    FQ_RETURN_IF_ERROR(
        backend->CopyToHost(values.data(), buffer.data(), static_cast<int64_t>(count * 4)));
    FQ_RETURN_IF_ERROR(backend->Synchronize());
    return values;
  }
  std::vector<BFloat16> raw(count);
  FQ_RETURN_IF_ERROR(
      backend->CopyToHost(raw.data(), buffer.data(), static_cast<int64_t>(count * 2)));
  FQ_RETURN_IF_ERROR(backend->Synchronize());
  for (size_t i = 0; i < count; ++i) values[i] = ToFloat(raw[i]);
  return values;
}

// INTERNAL when ‖actual - expected‖ is more than kSelfCheckLimit of ‖expected‖, or no number.
inline absl::Status CompareWithHost(std::string_view what, std::span<const float> actual,
                                    std::span<const double> expected, const Backend& backend) {
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = static_cast<double>(actual[i]) - expected[i];
    difference += error * error;
    size += expected[i] * expected[i];
  }
  const double relative = size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
  if (relative <= kSelfCheckLimit) return absl::OkStatus();
  return InternalError(
      "self-check: {}: {} computes it wrongly (relative error {:.3g}, limit {}); driver, card or "
      "build at fault",
      what, backend.info().device, relative, kSelfCheckLimit);
}

}  // namespace flashquant
