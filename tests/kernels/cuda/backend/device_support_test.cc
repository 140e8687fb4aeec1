// What a machine without a usable card or driver is told: one plain line with found and needed
// (G1).
#include "kernels/cuda/backend/device_support.h"

#include <gtest/gtest.h>

#include <string>

namespace flashquant::cuda {
namespace {

TEST(DeviceSupportTest, MissingDriverIsSaidWithTheWayOut) {
  const absl::Status status = CheckDriver(0, 13000);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(),
            "backend 'cuda': no usable NVIDIA driver; install one, or use --backend cpu");
}

TEST(DeviceSupportTest, DriverOfAnEarlierMajorVersionIsTooOld) {
  const absl::Status status = CheckDriver(12080, 13000);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(
      status.message(),
      "backend 'cuda': the NVIDIA driver is too old (it has CUDA 12.8, this build needs 13.0)");
}

TEST(DeviceSupportTest, DriverOfTheSameMajorVersionIsEnough) {
  EXPECT_TRUE(CheckDriver(13000, 13020).ok());
  EXPECT_TRUE(CheckDriver(13010, 13000).ok());
}

TEST(DeviceSupportTest, CardBeforeAmpereIsRefusedByName) {
  const absl::Status status = CheckCapability("Tesla T4", 7, 5);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(),
            "backend 'cuda': Tesla T4 has compute capability 7.5; at least 8.0 is needed");
  EXPECT_TRUE(CheckCapability("NVIDIA A100", 8, 0).ok());
  EXPECT_TRUE(CheckCapability("NVIDIA RTX", 12, 0).ok());
}

}  // namespace
}  // namespace flashquant::cuda
