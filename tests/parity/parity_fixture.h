// Runs op tests on every backend of this build: the CPU backend once per SIMD target of this
// machine. Tests talk to Backend only, so the same sources serve a second backend.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/backend.h"
#include "kernels/backend_factory.h"
#include "tests/support/status_matchers.h"

namespace flashquant {

// A backend, and for the CPU the Highway target it is held to.
struct ParityTarget {
  std::string kind = "cpu";
  int64_t simd_target = 0;
};

inline std::string ParityTargetName(const testing::TestParamInfo<ParityTarget>& info) {
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
  return targets;
}

class ParityTest : public testing::TestWithParam<ParityTarget> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam().simd_target);
    hwy::GetChosenTarget().DeInit();
    BackendOptions options;
    options.kind = GetParam().kind;
    options.num_threads = 2;
    auto backend = CreateBackend(options);
    FQ_ASSERT_OK(backend);
    backend_ = *std::move(backend);
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
  DeviceBuffer UploadZeros(int64_t num_floats) {
    return Upload(std::vector<float>(static_cast<size_t>(num_floats)));
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
  std::vector<float> RunLinear(const LinearWeight& weight, const std::vector<float>& x) {
    const int64_t num_rows = static_cast<int64_t>(x.size()) / weight.k();
    const DeviceBuffer x_device = Upload(x);
    const DeviceBuffer y_device = UploadZeros(num_rows * weight.n());
    LinearParams params;
    params.num_rows = static_cast<int32_t>(num_rows);
    params.weight = &weight;
    params.x = x_device.data();
    params.y = y_device.data();
    EXPECT_TRUE(backend_->Linear(params).ok());
    return Download<float>(y_device);
  }

 private:
  std::unique_ptr<Backend> backend_;
};

#define FQ_INSTANTIATE_PARITY(Fixture)                                                          \
  INSTANTIATE_TEST_SUITE_P(Backends, Fixture, testing::ValuesIn(::flashquant::ParityTargets()), \
                           ::flashquant::ParityTargetName)

}  // namespace flashquant
