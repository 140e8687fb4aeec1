#include "kernels/cuda/backend/device_support.h"

#include "kernels/base/status_macros.h"

namespace flashquant::cuda {
namespace {

constexpr int kLeastMajor = 8;

}  // namespace

absl::Status CheckDriver(int driver, int runtime) {
  if (driver <= 0) {
    return UnavailableError(
        "backend 'cuda': no usable NVIDIA driver; install one, or use --backend cpu");
  }
  // Within a major version an older driver runs what a newer toolkit built.
  if (driver / 1000 < runtime / 1000) {
    return UnavailableError(
        "backend 'cuda': the NVIDIA driver is too old (it has CUDA {}.{}, this build needs {}.0)",
        driver / 1000, driver % 1000 / 10, runtime / 1000);
  }
  return absl::OkStatus();
}

absl::Status CheckCapability(std::string_view card, int major, int minor) {
  if (major >= kLeastMajor) return absl::OkStatus();
  return UnavailableError(
      "backend 'cuda': {} has compute capability {}.{}; at least {}.0 is needed", card, major,
      minor, kLeastMajor);
}

}  // namespace flashquant::cuda
