// Runs the tests of QuantizerOps on every backend that this build and machine have, on inputs that
// all of them hold exactly.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/quantize/hessian.h"
#include "engine/quantize/quantizer_device.h"
#include "gtest/gtest.h"
#include "kernels/backend_factory.h"
#include "kernels/base/bfloat16.h"
#include "tests/support/status_matchers.h"

namespace flashquant {

inline float Rounded(float value) { return ToFloat(ToBFloat16(value)); }

// Correlated rows, some columns much larger than the others, numbers that BF16 holds.
inline std::vector<float> CorrelatedRows(int64_t rows, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> mix(static_cast<size_t>(4 * k));
  for (float& value : mix) value = normal(random);
  std::vector<float> inputs;
  for (int64_t row = 0; row < rows; ++row) {
    float common[4];
    for (float& value : common) value = normal(random);
    for (int64_t i = 0; i < k; ++i) {
      float value = normal(random);
      for (int64_t d = 0; d < 4; ++d)
        value += 0.7f * common[d] * mix[static_cast<size_t>(d * k + i)];
      inputs.push_back(Rounded(value * (i % 41 == 3 ? 12.0f : 1.0f)));
    }
  }
  return inputs;
}

inline std::vector<float> HeavyTailedWeights(int64_t n, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  std::vector<float> weights(static_cast<size_t>(n * k));
  for (float& weight : weights) {
    weight = 0.02f * normal(random) * (uniform(random) < 0.01f ? 8.0f : 1.0f);
  }
  return weights;
}

class QuantizerParityTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    auto device = OpenQuantizerDevice(GetParam(), 2);
    FQ_ASSERT_OK(device);
    device_ = *std::move(device);
    ASSERT_EQ(ops().name(), GetParam());
  }
  QuantizerOps& ops() { return *device_.ops; }
  bool is_exact() const { return GetParam() == "cpu"; }

  // Adds rows [num_rows, k] of numbers that the backend's activations hold.
  void Add(std::span<const float> rows, int64_t k) {
    Backend& backend = *device_.backend;
    const bool is_float = backend.info().activation_dtype == DType::kF32;
    std::vector<uint8_t> bytes(rows.size() * (is_float ? 4 : 2));
    for (size_t i = 0; i < rows.size(); ++i) {
      const BFloat16 rounded = ToBFloat16(rows[i]);
      if (is_float) {
        std::memcpy(bytes.data() + 4 * i, &rows[i], 4);
      } else {
        std::memcpy(bytes.data() + 2 * i, &rounded, 2);
      }
    }
    auto buffer = backend.Allocate(static_cast<int64_t>(bytes.size()));
    FQ_ASSERT_OK(buffer);
    FQ_ASSERT_OK(backend.CopyToDevice(buffer->data(), bytes.data(), buffer->num_bytes()));
    FQ_ASSERT_OK(ops().AddInputs(buffer->data(), static_cast<int64_t>(rows.size()) / k));
    FQ_ASSERT_OK(backend.Synchronize());
  }
  void Load(std::span<const float> rows, int64_t k) {
    FQ_ASSERT_OK(ops().BeginInputs(k));
    Add(rows, k);
  }
  // The inputs that the ops hold.
  Hessian HostHessian() {
    auto moments = ops().InputMoments();
    EXPECT_THAT(moments, IsOk());
    return Hessian(ops().num_columns(), *std::move(moments));
  }

  QuantizerDevice device_;
};

inline std::vector<std::string> QuantizerKinds() {
  std::vector<std::string> kinds = {"cpu"};
  if (CreateBackend({.kind = "cuda"}).ok()) kinds.emplace_back("cuda");
  return kinds;
}
}  // namespace flashquant
