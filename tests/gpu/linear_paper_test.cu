// Correctness of the kernel of the paper's own mapping on a GPU: every step of its ablation against
// products in FP64 of the exact matrix. Stand-alone program: exit code 0 when all checks hold.
// `--quick` runs few, small cases (for compute-sanitizer).
#include <cmath>
#include <cstring>
#include <string>
#include <thread>

#include "kernels/bench/linear_problem.h"
#include "kernels/cuda/linear_paper/paper_launch.h"
#include "tests/gpu/device_layer.cuh"
#include "tests/gpu/fp64_product.cuh"
#include "tests/gpu/output_check.h"

namespace flashquant::gpu_test {

using namespace bench;

namespace {

constexpr int kMaxM = 40;  // more than one pass

int Threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

struct Step {
  const char* name;
  bool extra_warps;
  cuda::PaperOrder order;
};

constexpr Step kSteps[] = {{"tiling", false, cuda::PaperOrder::kNone},
                           {"extra warps", true, cuda::PaperOrder::kNone},
                           {"reordering", true, cuda::PaperOrder::kReordered}};

// One problem with its reference; x and y have longer strides than rows.
class Case {
 public:
  explicit Case(const ProblemSpec& spec)
      : problem_(MakeProblem(spec, Threads())), x_stride_(spec.k + 8), y_stride_(spec.n + kGuard) {
    Random random(spec.seed + 99);
    std::vector<uint16_t> x(static_cast<size_t>(kMaxM) * static_cast<size_t>(x_stride_), kPoison);
    for (int m = 0; m < kMaxM; ++m) {
      for (int k = 0; k < spec.k; ++k) {
        x[static_cast<size_t>(m * x_stride_ + k)] = ToBf16(random.Normal() + 0.25f);
      }
    }
    x_ = DeviceArray<uint16_t>(x);
    reference_ = Fp64Product(problem_.DenseMatrix(), x_.get(), kMaxM, spec.k, spec.n, x_stride_);
  }

  // `blocks`: of the grid; `shared_kb` 0: what the device has.
  void Verify(const Step& step, int m, int blocks, int shared_kb) {
    const int buckets = (step.extra_warps ? cuda::kPaperSparseWarps : cuda::kPaperDenseWarps) *
                        cuda::kPaperBucketsPerWarp;
    const cuda::PaperLinear packed =
        cuda::PackPaper(problem_.weight(), problem_.outliers(), buckets, step.order, Threads());
    const DeviceArray<uint8_t> weight(packed.bytes);
    DeviceArray<float> workspace(static_cast<size_t>(cuda::PaperWorkspaceBytes(blocks, m)) / 4);
    workspace.FillBytes(0xff);
    DeviceArray<uint32_t> counters(static_cast<size_t>(packed.layout.tiles_n));
    counters.FillBytes(0);
    const DeviceArray<uint16_t> y(
        std::vector<uint16_t>(static_cast<size_t>((kMaxM + kGuard) * y_stride_), kPoison));
    cuda::PaperLinearParams p;
    p.x = x_.get();
    p.y = y.get();
    p.x_stride = x_stride_;
    p.y_stride = y_stride_;
    p.m = m;
    p.layout = packed.layout;
    p.weight = weight.get();
    p.num_blocks = blocks;
    p.extra_warps = step.extra_warps;
    p.workspace = workspace.get();
    p.counters = counters.get();
    p.shared_bytes_limit = shared_kb * 1024;
    const std::string name = problem_.spec.Name() + " m" + std::to_string(m) + " " + step.name +
                             " blocks " + std::to_string(blocks);
    const cudaError_t error = cuda::LaunchPaperLinear(p, nullptr);
    Check(error == cudaSuccess, name + ": " + cudaGetErrorString(error));
    if (error != cudaSuccess) return;
    Compare(y.ToHost(), m, name);
    FQ_CUDA_OK(cuda::LaunchPaperLinear(p, nullptr));  // the counters were left zero
    const std::vector<uint16_t> again = y.ToHost();
    Compare(again, m, name + " again");
    // Sums of different blocks are added in their order.
    FQ_CUDA_OK(cuda::LaunchPaperLinear(p, nullptr));
    Check(y.ToHost() == again, name + ": two runs differ");
  }

 private:
  void Compare(const std::vector<uint16_t>& y, int m, const std::string& name) {
    CompareWithReference(y, y_stride_, reference_, m, problem_.spec.n, name);
  }

  Problem problem_;
  int x_stride_;
  int y_stride_;
  DeviceArray<uint16_t> x_;
  std::vector<double> reference_;
};

ProblemSpec Spec(int k, int n, int group_size, double density, OutlierLayout layout) {
  ProblemSpec spec;
  spec.k = k;
  spec.n = n;
  spec.group_size = group_size;
  spec.density = density;
  spec.layout = layout;
  spec.seed = static_cast<uint64_t>(k + n);
  return spec;
}

// Grids of one block, of blocks that share columns of tiles in every way, and of more than tiles.
void VerifyAll(const ProblemSpec& spec, const std::vector<int>& ms) {
  Case c(spec);
  for (const Step& step : kSteps) {
    for (const int m : ms) {
      for (const int blocks : {1, 5, 132}) c.Verify(step, m, blocks, blocks == 5 ? 99 : 0);
    }
  }
}

int Main(bool quick) {
  VerifyAll(Spec(392, 136, -1, 0.02, OutlierLayout::kRaggedRecords), {3, 40});
  VerifyAll(Spec(520, 264, -1, 0.02, OutlierLayout::kHotTile), {9});
  if (!quick) {
    for (const int group : {32, 64, 128, -1}) {
      for (const bool zeros : {false, true}) {
        for (const double density : {0.0, 0.01, 0.03, 0.1}) {
          ProblemSpec spec = Spec(1536, 896, group, density, OutlierLayout::kFullRecords);
          spec.zero_points = zeros;
          VerifyAll(spec, {1, 8, 16, 31});
        }
      }
    }
    for (const OutlierLayout layout :
         {OutlierLayout::kEmptyTiles, OutlierLayout::kHotColumn, OutlierLayout::kHotTile}) {
      VerifyAll(Spec(2056, 712, -1, 0.02, layout), {3, 13, 32});
    }
    for (const auto& [k, n] : {std::pair{8, 8}, {200, 200}, {896, 4864}, {18944, 896}}) {
      VerifyAll(Spec(k, n, -1, 0.02, OutlierLayout::kRaggedRecords), {7, 32});
    }
  }
  FQ_CUDA_OK(cudaDeviceSynchronize());
  std::printf("paper's mapping: %d checks, %d failed, worst relative error %.2e\n", num_checks,
              num_failures, worst_error);
  return num_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flashquant::gpu_test

int main(int argc, char** argv) {
  return flashquant::gpu_test::Main(argc > 1 && std::strcmp(argv[1], "--quick") == 0);
}
