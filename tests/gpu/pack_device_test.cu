// The device packer against the host packer, byte for byte, and its time for as many weights as an
// 8B model has. Stand-alone program: exit code 0 when all checks hold. `--quick` leaves the timing
// out (for compute-sanitizer).
// Oracle: PackLinear, whose bytes tests/kernels/cuda/linear_w4a16/pack_test.cc decodes.
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "kernels/bench/linear_problem.h"
#include "kernels/cuda/linear_w4a16/pack_device.h"
#include "tests/gpu/device_layer.cuh"

namespace flashquant::gpu_test {

using namespace bench;

namespace {

constexpr int kPoison = 0xa5;
constexpr size_t kGuardBytes = 64;
constexpr double kWeightsOfModel = 8e9;
constexpr double kMaxSeconds = 2.0;

int Threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

// A problem's arrays in device memory.
class DeviceProblem {
 public:
  explicit DeviceProblem(const Problem& problem)
      : problem_(problem),
        qweight_(problem.qweight),
        scales_(problem.scales),
        zeros_(problem.zeros),
        indptr_(problem.tile_indptr),
        records_(problem.records) {}

  cuda::Int4Arrays weight() const {
    cuda::Int4Arrays arrays = problem_.weight();
    arrays.qweight = qweight_.get();
    arrays.scales = scales_.get();
    if (arrays.zeros != nullptr) arrays.zeros = zeros_.get();
    return arrays;
  }
  cuda::TileCooPointers outliers() const {
    cuda::TileCooPointers pointers = problem_.outliers();
    if (pointers.tile_indptr != nullptr) pointers.tile_indptr = indptr_.get();
    pointers.records = records_.get();
    return pointers;
  }

 private:
  const Problem& problem_;
  DeviceArray<uint8_t> qweight_;
  DeviceArray<uint16_t> scales_;
  DeviceArray<uint8_t> zeros_;
  DeviceArray<uint32_t> indptr_;
  DeviceArray<uint8_t> records_;
};

bool SameLayout(const cuda::PackedLayout& a, const cuda::PackedLayout& b) {
  return a.n == b.n && a.k == b.k && a.num_strips == b.num_strips && a.num_units == b.num_units &&
         a.groups_per_chunk == b.groups_per_chunk && a.has_zeros == b.has_zeros &&
         a.unit_dense_bytes == b.unit_dense_bytes && a.max_outlier_bytes == b.max_outlier_bytes &&
         a.index_offset == b.index_offset && a.outliers_offset == b.outliers_offset &&
         a.num_bytes == b.num_bytes;
}

// What is wrong, empty if nothing.
std::string CheckCase(const Problem& problem) {
  const cuda::PackedLinear expected =
      cuda::PackLinear(problem.weight(), problem.outliers(), Threads());
  const DeviceProblem device(problem);
  DeviceArray<uint8_t> scratch(static_cast<size_t>(cuda::DevicePackScratchBytes(problem.weight())));
  scratch.FillBytes(kPoison);
  cuda::PackedLayout layout;
  FQ_CUDA_OK(
      cuda::LayOutOnDevice(device.weight(), device.outliers(), scratch.get(), nullptr, &layout));
  if (!SameLayout(layout, expected.layout)) return "another layout";
  DeviceArray<uint8_t> out(expected.bytes.size() + kGuardBytes);
  out.FillBytes(kPoison);
  FQ_CUDA_OK(cuda::PackOnDevice(device.weight(), device.outliers(), layout, scratch.get(),
                                out.get(), nullptr));
  const std::vector<uint8_t> found = out.ToHost();
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] == (i < expected.bytes.size() ? expected.bytes[i] : kPoison)) continue;
    return "byte " + std::to_string(i) + " of " + std::to_string(expected.bytes.size()) +
           " (index at " + std::to_string(layout.index_offset) + ", outliers at " +
           std::to_string(layout.outliers_offset) + ")";
  }
  return "";
}

std::vector<ProblemSpec> Specs(bool quick) {
  std::vector<ProblemSpec> specs;
  uint64_t seed = 1;
  for (const auto& [k, n] : {std::pair{256, 32}, {264, 40}, {896, 1000}, {2048, 512}, {8, 8}}) {
    for (const int group_size : {32, 64, 128, -1}) {
      for (const auto layout :
           {OutlierLayout::kFullRecords, OutlierLayout::kRaggedRecords, OutlierLayout::kEmptyTiles,
            OutlierLayout::kHotColumn, OutlierLayout::kHotTile}) {
        for (const auto& [tile_k, tile_n] : {std::pair{256, 128}, {64, 64}, {128, 256}}) {
          ProblemSpec spec;
          spec.k = k;
          spec.n = n;
          spec.group_size = group_size;
          spec.zero_points = seed % 2 == 0;
          spec.density = std::vector<double>{0.0, 0.01, 0.03, 0.1}[seed % 4];
          spec.layout = layout;
          spec.tile_k = tile_k;
          spec.tile_n = tile_n;
          spec.seed = seed++;
          if (!quick || seed % 16 == 0) specs.push_back(spec);
        }
      }
    }
  }
  return specs;
}

// Seconds for as many weights as the model has, as layers of this one's size.
double TimeModel(const Problem& problem) {
  const DeviceProblem device(problem);
  DeviceArray<uint8_t> scratch(static_cast<size_t>(cuda::DevicePackScratchBytes(problem.weight())));
  cuda::PackedLayout layout;
  FQ_CUDA_OK(
      cuda::LayOutOnDevice(device.weight(), device.outliers(), scratch.get(), nullptr, &layout));
  DeviceArray<uint8_t> out(static_cast<size_t>(layout.num_bytes));
  const double weights = static_cast<double>(problem.spec.k) * problem.spec.n;
  const int layers = static_cast<int>(kWeightsOfModel / weights) + 1;
  FQ_CUDA_OK(cudaDeviceSynchronize());
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < layers; ++i) {
    FQ_CUDA_OK(
        cuda::LayOutOnDevice(device.weight(), device.outliers(), scratch.get(), nullptr, &layout));
    FQ_CUDA_OK(cuda::PackOnDevice(device.weight(), device.outliers(), layout, scratch.get(),
                                  out.get(), nullptr));
  }
  FQ_CUDA_OK(cudaDeviceSynchronize());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return seconds.count() / (layers * weights) * kWeightsOfModel;
}

int Run(bool quick) {
  int num_checks = 0;
  int num_failures = 0;
  for (const ProblemSpec& spec : Specs(quick)) {
    const std::string wrong = CheckCase(MakeProblem(spec, Threads()));
    ++num_checks;
    if (wrong.empty()) continue;
    ++num_failures;
    std::printf("FAILED: %s, tiles %dx%d: %s\n", spec.Name().c_str(), spec.tile_k, spec.tile_n,
                wrong.c_str());
  }
  for (const double density : {0.01, 0.03, 0.1}) {
    if (quick) break;
    ProblemSpec spec;
    spec.k = 4096;
    spec.n = 14336;
    spec.density = density;
    const double seconds = TimeModel(MakeProblem(spec, Threads()));
    std::printf("device packing of 8e9 weights, %.0f%% outliers: %.3f s\n", density * 100, seconds);
    ++num_checks;
    num_failures += seconds < kMaxSeconds ? 0 : 1;
  }
  std::printf("device packer: %d checks, %d failed\n", num_checks, num_failures);
  return num_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flashquant::gpu_test

int main(int argc, char** argv) {
  return flashquant::gpu_test::Run(argc > 1 && std::strcmp(argv[1], "--quick") == 0);
}
