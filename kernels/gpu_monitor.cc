// The functions and structs below are those of NVML's stable interface, declared here so that no
// header of the driver is needed to build. Source: NVIDIA's NVML API reference.
#include "kernels/gpu_monitor.h"

#include <dlfcn.h>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

using Device = void*;
constexpr int kSuccess = 0;
constexpr int kTemperatureGpu = 0;
constexpr int kClockSm = 1;
constexpr int kClockMemory = 2;
constexpr int kUncorrected = 1;
constexpr int kSinceDriverLoad = 0;

struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned int gpu, memory;
};

struct Library {
  void* handle = nullptr;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_bus_id)(const char*, Device*) = nullptr;
  int (*index)(Device, unsigned int*) = nullptr;
  // Each of these may be missing in an old driver.
  int (*memory)(Device, Memory*) = nullptr;
  int (*utilization)(Device, Utilization*) = nullptr;
  int (*temperature)(Device, int, unsigned int*) = nullptr;
  int (*power)(Device, unsigned int*) = nullptr;
  int (*energy)(Device, unsigned long long*) = nullptr;
  int (*clock)(Device, int, unsigned int*) = nullptr;
  int (*ecc)(Device, int, int, unsigned long long*) = nullptr;

  bool Load(const std::string& name) {
    handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return false;
    const auto find = [this](auto* function, const char* symbol) {
      *function =
          reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(handle, symbol));
    };
    find(&init, "nvmlInit_v2");
    find(&shutdown, "nvmlShutdown");
    find(&by_bus_id, "nvmlDeviceGetHandleByPciBusId_v2");
    find(&index, "nvmlDeviceGetIndex");
    find(&memory, "nvmlDeviceGetMemoryInfo");
    find(&utilization, "nvmlDeviceGetUtilizationRates");
    find(&temperature, "nvmlDeviceGetTemperature");
    find(&power, "nvmlDeviceGetPowerUsage");
    find(&energy, "nvmlDeviceGetTotalEnergyConsumption");
    find(&clock, "nvmlDeviceGetClockInfo");
    find(&ecc, "nvmlDeviceGetTotalEccErrors");
    return init != nullptr && shutdown != nullptr && by_bus_id != nullptr && index != nullptr;
  }
};

class NvmlMonitor final : public GpuMonitor {
 public:
  NvmlMonitor() = default;
  NvmlMonitor(const NvmlMonitor&) = delete;
  NvmlMonitor& operator=(const NvmlMonitor&) = delete;
  ~NvmlMonitor() override {
    if (started_) library_.shutdown();
    if (library_.handle != nullptr) dlclose(library_.handle);
  }

  absl::Status Start(const std::string& pci_bus_id, const std::string& library) {
    if (!library_.Load(library)) return UnavailableError("{}: not there or not complete", library);
    if (const int error = library_.init(); error != kSuccess) {
      return UnavailableError("{}: does not start (error {})", library, error);
    }
    started_ = true;
    unsigned int index = 0;
    int error = library_.by_bus_id(pci_bus_id.c_str(), &device_);
    if (error == kSuccess) error = library_.index(device_, &index);
    if (error != kSuccess) {
      return UnavailableError("{}: no card at {} (error {})", library, pci_bus_id, error);
    }
    index_ = static_cast<int>(index);
    return absl::OkStatus();
  }

  int index() const override { return index_; }

  GpuReading Read() override {
    GpuReading reading;
    Memory memory{};
    if (Got(library_.memory, &memory)) {
      reading.memory_total_bytes = static_cast<int64_t>(memory.total);
      // What is reserved is in neither.
      reading.memory_used_bytes = static_cast<int64_t>(memory.total - memory.free);
    }
    Utilization utilization{};
    if (Got(library_.utilization, &utilization)) reading.utilization = utilization.gpu / 100.0;
    unsigned int value = 0;
    if (library_.temperature != nullptr &&
        library_.temperature(device_, kTemperatureGpu, &value) == kSuccess) {
      reading.temperature_celsius = value;
    }
    if (Got(library_.power, &value)) reading.power_watts = value / 1e3;
    unsigned long long count = 0;
    if (Got(library_.energy, &count)) reading.energy_joules = static_cast<double>(count) / 1e3;
    reading.sm_clock_hertz = Clock(kClockSm);
    reading.memory_clock_hertz = Clock(kClockMemory);
    if (library_.ecc != nullptr &&
        library_.ecc(device_, kUncorrected, kSinceDriverLoad, &count) == kSuccess) {
      reading.ecc_errors = static_cast<int64_t>(count);
    }
    return reading;
  }

 private:
  template <typename T>
  bool Got(int (*function)(Device, T*), T* value) const {
    return function != nullptr && function(device_, value) == kSuccess;
  }
  std::optional<double> Clock(int kind) const {
    unsigned int megahertz = 0;
    if (library_.clock == nullptr || library_.clock(device_, kind, &megahertz) != kSuccess) {
      return std::nullopt;
    }
    return megahertz * 1e6;
  }

  Library library_;
  bool started_ = false;
  Device device_ = nullptr;
  int index_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuMonitor>> GpuMonitor::Open(const std::string& pci_bus_id,
                                                             const std::string& library) {
  auto monitor = std::make_unique<NvmlMonitor>();
  FQ_RETURN_IF_ERROR(monitor->Start(pci_bus_id, library));
  return monitor;
}

}  // namespace flashquant
