// Runs op tests on every backend that this build and machine have: the CPU backend once per SIMD
// target, and CUDA. Tests talk to Backend only. Activations go up and down as floats, rounded to
// the backend's type: what a test takes as the op's input must come from RoundToAct.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/backend.h"
#include "kernels/backend_factory.h"
#include "kernels/base/bfloat16.h"
#include "tests/support/status_matchers.h"

namespace flashquant {

// Unit roundoff of BFloat16.
inline constexpr double kBFloat16Roundoff = 0x1p-8;

// A backend, and for the CPU the Highway target it is held to.
struct ParityTarget {
  std::string kind = "cpu";
  int64_t simd_target = 0;
};

inline std::string ParityTargetName(const testing::TestParamInfo<ParityTarget>& info) {
  if (info.param.kind != "cpu") return info.param.kind;
  return info.param.kind + "_" + hwy::TargetName(info.param.simd_target);
}

// Best target first; the last is what runs without any SIMD extension.
inline std::vector<ParityTarget> ParityTargets() {
  std::vector<ParityTarget> targets;
  for (const int64_t target : {int64_t{HWY_AVX3_DL}, int64_t{HWY_AVX3}, int64_t{HWY_AVX2},
                               int64_t{HWY_SSE4}, int64_t{HWY_NEON}}) {
    if ((hwy::SupportedTargets() & target) != 0) targets.push_back({"cpu", target});
  }
  targets.push_back({"cpu", HWY_SCALAR});
  if (CreateBackend({.kind = "cuda"}).ok()) targets.push_back({"cuda", 0});
  return targets;
}

class ParityTest : public testing::TestWithParam<ParityTarget> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam().simd_target);
    hwy::GetChosenTarget().DeInit();
    MakeBackend("auto");
  }
  // Another backend, with this type of KV cache; the one before stays for what it allocated.
  void MakeBackend(std::string_view kv_cache_dtype) {
    BackendOptions options;
    options.kind = GetParam().kind;
    options.num_threads = 2;
    options.kv_cache_dtype = kv_cache_dtype;
    auto backend = CreateBackend(options);
    FQ_ASSERT_OK(backend);
    if (backend_ != nullptr) earlier_.push_back(std::move(backend_));
    backend_ = *std::move(backend);
    act_dtype_ = backend_->info().activation_dtype;
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }

  Backend& backend() { return *backend_; }

  template <typename T>
  DeviceBuffer Upload(const std::vector<T>& host) {
    const auto num_bytes = static_cast<int64_t>(host.size() * sizeof(T));
    auto buffer = backend_->Allocate(num_bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_TRUE(backend_->CopyToDevice(buffer->data(), host.data(), num_bytes).ok());
    return *std::move(buffer);
  }
  DeviceBuffer UploadFloatZeros(int64_t num_floats) {
    return Upload(std::vector<float>(static_cast<size_t>(num_floats)));
  }

  // What is left of values in the backend's activation type.
  float RoundToAct(float value) const {
    return act_dtype_ == DType::kF32 ? value : ToFloat(ToBFloat16(value));
  }
  std::vector<float> RoundToAct(std::vector<float> values) const {
    for (float& value : values) value = RoundToAct(value);
    return values;
  }
  // How far rounding to the activation type may move a value; 0 for FP32, whose roundings tests
  // account for themselves.
  double ActRounding(double value) const {
    return act_dtype_ == DType::kF32 ? 0.0 : kBFloat16Roundoff * std::fabs(value);
  }
  bool acts_are_float() const { return act_dtype_ == DType::kF32; }

  DeviceBuffer UploadActs(const std::vector<float>& values) {
    if (act_dtype_ == DType::kF32) return Upload(values);
    std::vector<BFloat16> rounded;
    for (const float value : values) rounded.push_back(ToBFloat16(value));
    return Upload(rounded);
  }
  DeviceBuffer UploadActZeros(int64_t num_elements) {
    return UploadActs(std::vector<float>(static_cast<size_t>(num_elements)));
  }
  std::vector<float> DownloadActs(const DeviceBuffer& buffer) {
    if (act_dtype_ == DType::kF32) return Download<float>(buffer);
    std::vector<float> values;
    for (const BFloat16 value : Download<BFloat16>(buffer)) values.push_back(ToFloat(value));
    return values;
  }
  template <typename T>
  std::vector<T> Download(const DeviceBuffer& buffer) {
    std::vector<T> host(static_cast<size_t>(buffer.num_bytes()) / sizeof(T));
    EXPECT_TRUE(backend_->Synchronize().ok());
    EXPECT_TRUE(backend_->CopyToHost(host.data(), buffer.data(), buffer.num_bytes()).ok());
    return host;
  }

  std::unique_ptr<LinearWeight> Pack(std::span<const LinearPart> parts) {
    auto weight = backend_->PackLinear(parts);
    EXPECT_TRUE(weight.ok()) << weight.status();
    return weight.ok() ? *std::move(weight) : nullptr;
  }
  // FP32 outputs, as the logits are; or in the activation type.
  std::vector<float> RunLinear(const LinearWeight& weight, const std::vector<float>& x,
                               bool float_outputs = true) {
    const int64_t num_rows = static_cast<int64_t>(x.size()) / weight.k();
    const DeviceBuffer x_device = UploadActs(x);
    const int64_t size = num_rows * weight.n();
    const DeviceBuffer y_device = float_outputs ? UploadFloatZeros(size) : UploadActZeros(size);
    LinearParams params;
    params.num_rows = static_cast<int32_t>(num_rows);
    params.weight = &weight;
    params.x = x_device.data();
    params.y = y_device.data();
    params.y_dtype = float_outputs ? DType::kF32 : act_dtype_;
    EXPECT_TRUE(backend_->Linear(params).ok());
    return float_outputs ? Download<float>(y_device) : DownloadActs(y_device);
  }

 private:
  std::vector<std::unique_ptr<Backend>> earlier_;
  std::unique_ptr<Backend> backend_;
  DType act_dtype_ = DType::kF32;
};

#define FQ_INSTANTIATE_PARITY(Fixture)                                                          \
  INSTANTIATE_TEST_SUITE_P(Backends, Fixture, testing::ValuesIn(::flashquant::ParityTargets()), \
                           ::flashquant::ParityTargetName)

}  // namespace flashquant
