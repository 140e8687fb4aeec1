// Unpacking of packed weights on a GPU: every element must be the exact one, rounded once to BF16.
// Stand-alone program: exit code 0 when all checks hold. `--quick` runs few, small cases (for
// compute-sanitizer).
// Oracle: Problem::DenseMatrix from the canonical arrays.
#include <cstring>
#include <string>
#include <thread>

#include "kernels/bench/linear_problem.h"
#include "kernels/cuda/backend/unpack_weight.h"
#include "tests/gpu/device_layer.cuh"

namespace flashquant::gpu_test {

using namespace bench;

namespace {

constexpr size_t kGuard = 64;         // elements behind the matrix that nobody may write
constexpr uint16_t kPoison = 0x7fc1;  // a NaN

int num_checks = 0;
int num_failures = 0;

void Verify(const ProblemSpec& spec) {
  const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const Problem problem = MakeProblem(spec, threads);
  const cuda::PackedLinear packed = cuda::PackLinear(problem.weight(), problem.outliers(), threads);
  const DeviceArray<uint8_t> weight(packed.bytes);
  const DeviceArray<cuda::UnpackTables> tables(std::vector{cuda::MakeUnpackTables()});
  const std::vector<double> want = problem.DenseMatrix();
  const DeviceArray<uint16_t> matrix(std::vector<uint16_t>(want.size() + kGuard, kPoison));
  // In two ranges of strips, where there are two.
  const int32_t half = (packed.layout.num_strips + 1) / 2;
  for (const cuda::StripRange& strips :
       {cuda::StripRange{0, half}, cuda::StripRange{half, packed.layout.num_strips - half}}) {
    if (strips.count == 0) continue;
    FQ_CUDA_OK(cuda::LaunchUnpackWeight(
        packed.layout, weight.get(), tables.get(), strips,
        matrix.get() + int64_t{strips.first} * cuda::kStripN * spec.k, nullptr));
  }
  const std::vector<uint16_t> found = matrix.ToHost();
  std::string wrong;
  for (size_t i = 0; i < found.size() && wrong.empty(); ++i) {
    const bool inside = i < want.size();
    // Products of a BF16 scale and a small integer are exact in float, and so are outliers; +0 and
    // -0 are one number.
    const bool good = inside ? FromBf16(found[i]) == FromBf16(ToBf16(static_cast<float>(want[i])))
                             : found[i] == kPoison;
    if (!good) wrong = "element " + std::to_string(i) + " of " + std::to_string(want.size());
  }
  ++num_checks;
  if (wrong.empty()) return;
  ++num_failures;
  std::printf("FAILED: %s: %s\n", spec.Name().c_str(), wrong.c_str());
}

int Main(bool quick) {
  uint64_t seed = 1;
  for (const auto& [k, n] : {std::pair{8, 8}, {392, 136}, {1536, 896}, {2056, 712}}) {
    if (quick && k > 400) continue;
    for (const int group : {32, 64, 128, -1}) {
      for (const bool zeros : {false, true}) {
        for (const OutlierLayout layout :
             {OutlierLayout::kFullRecords, OutlierLayout::kRaggedRecords,
              OutlierLayout::kEmptyTiles, OutlierLayout::kHotColumn, OutlierLayout::kHotTile}) {
          ProblemSpec spec;
          spec.k = k;
          spec.n = n;
          spec.group_size = group;
          spec.zero_points = zeros;
          spec.density = std::vector<double>{0.0, 0.01, 0.03, 0.1}[seed % 4];
          spec.layout = layout;
          spec.seed = seed++;
          Verify(spec);
        }
      }
    }
  }
  std::printf("unpacking: %d checks, %d failed\n", num_checks, num_failures);
  return num_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flashquant::gpu_test

int main(int argc, char** argv) {
  return flashquant::gpu_test::Main(argc > 1 && std::strcmp(argv[1], "--quick") == 0);
}
