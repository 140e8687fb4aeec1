// A stand-in for the driver's management library with one card, whose values tests know. It has no
// energy counter, as old cards have none.
#include <cstring>

struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned int gpu, memory;
};

static int card;

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  *device = &card;
  return std::strcmp(bus_id, "0000:0d:00.0") == 0 ? 0 : 6;
}
int nvmlDeviceGetIndex(void* device, unsigned int* index) {
  *index = 3;
  return device == &card ? 0 : 2;
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = 1000;
  memory->free = 200;
  memory->used = 790;  // 10 are reserved
  return device == &card ? 0 : 2;
}
int nvmlDeviceGetUtilizationRates(void* device, Utilization* utilization) {
  utilization->gpu = 42;
  utilization->memory = 7;
  return device == &card ? 0 : 2;
}
int nvmlDeviceGetTemperature(void* device, int sensor, unsigned int* degrees) {
  *degrees = 61;
  return device == &card && sensor == 0 ? 0 : 2;
}
int nvmlDeviceGetPowerUsage(void* device, unsigned int* milliwatts) {
  *milliwatts = 250500;
  return device == &card ? 0 : 2;
}
int nvmlDeviceGetTotalEnergyConsumption(void* /*device*/, unsigned long long* millijoules) {
  *millijoules = 0;
  return 3;  // not supported
}
int nvmlDeviceGetClockInfo(void* device, int kind, unsigned int* megahertz) {
  *megahertz = kind == 1 ? 1980 : 3201;
  return device == &card ? 0 : 2;
}
int nvmlDeviceGetTotalEccErrors(void* device, int type, int counter, unsigned long long* count) {
  *count = 2;
  return device == &card && type == 1 && counter == 0 ? 0 : 2;
}
}
