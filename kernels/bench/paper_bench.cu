// See paper_bench.h.
#include "kernels/bench/paper_bench.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "kernels/bench/device_memory.cuh"
#include "kernels/bench/graph_timer.h"
#include "kernels/bench/linear_problem.h"
#include "kernels/cuda/linear_paper/paper_launch.h"

namespace flashquant::bench {
namespace {

int Threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

int Buckets(PaperStep step) {
  const int warps = step == PaperStep::kTiling ? cuda::kPaperDenseWarps : cuda::kPaperSparseWarps;
  return warps * cuda::kPaperBucketsPerWarp;
}

// A packed layer, its copies, and what launches of it need.
class PaperLayer {
 public:
  PaperLayer(const cuda::PaperLinear& packed, PaperStep step, const KernelBenchOptions& options)
      : copies_(ColdCopies(DeviceArray<uint8_t>(packed.bytes),
                           NumColdCopies(packed.layout.num_bytes))) {
    int num_sms = 0;
    FQ_NOTE_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
    int most = 1;
    for (const int m : options.ms) most = std::max(most, m);
    x_ = RandomActivations(most, packed.layout.k);
    y_ = DeviceArray<uint16_t>(static_cast<size_t>(most) * static_cast<size_t>(packed.layout.n));
    workspace_ = DeviceArray<float>(static_cast<size_t>(cuda::PaperWorkspaceBytes(num_sms, most)) /
                                    sizeof(float));
    counters_ = DeviceArray<uint32_t>(static_cast<size_t>(packed.layout.tiles_n));
    counters_.FillBytes(0);
    params_.x = x_.get();
    params_.y = y_.get();
    params_.x_stride = packed.layout.k;
    params_.y_stride = packed.layout.n;
    params_.layout = packed.layout;
    params_.num_blocks = num_sms;
    params_.extra_warps = step != PaperStep::kTiling;
    params_.workspace = workspace_.get();
    params_.counters = counters_.get();
    params_.shared_bytes_limit = options.shared_kb * 1024;
  }

  double Time(int m) {
    params_.m = m;
    return TimeGraph(static_cast<int>(copies_.size()), [&](int i, cudaStream_t stream) {
      params_.weight = copies_[static_cast<size_t>(i)].get();
      return FQ_NOTE_CUDA(cuda::LaunchPaperLinear(params_, stream));
    });
  }

 private:
  static DeviceArray<uint16_t> RandomActivations(int m, int k) {
    std::vector<uint16_t> x(static_cast<size_t>(m) * static_cast<size_t>(k));
    Random random(5);
    for (uint16_t& value : x) value = ToBf16(random.Normal());
    return DeviceArray<uint16_t>(x);
  }

  std::vector<DeviceArray<uint8_t>> copies_;
  DeviceArray<uint16_t> x_;
  DeviceArray<uint16_t> y_;
  DeviceArray<float> workspace_;
  DeviceArray<uint32_t> counters_;
  cuda::PaperLinearParams params_;
};

void TimeProblem(const Problem& problem, const KernelBenchOptions& options,
                 const std::function<void(PaperStep, const KernelTiming&)>& row) {
  for (const PaperStep step : kPaperSteps) {
    const auto order =
        step == PaperStep::kReordering ? cuda::PaperOrder::kReordered : cuda::PaperOrder::kNone;
    const cuda::PaperLinear packed =
        cuda::PackPaper(problem.weight(), problem.outliers(), Buckets(step), order, Threads());
    PaperLayer layer(packed, step, options);
    for (const int m : options.ms) {
      KernelTiming timing;
      timing.shape = {problem.spec.k, problem.spec.n};
      timing.m = m;
      timing.density = problem.spec.density;
      timing.bytes = packed.layout.num_bytes;
      timing.us = layer.Time(m);
      if (CudaFailed()) return;
      row(step, timing);
    }
  }
}

}  // namespace

bool TimePaperKernels(const KernelBenchOptions& options,
                      const std::function<void(PaperStep, const KernelTiming&)>& row,
                      std::string* error) {
  FirstCudaError().clear();
  for (const KernelShape& shape : options.shapes) {
    for (const double density : options.densities) {
      if (CudaFailed()) break;
      ProblemSpec spec;
      spec.k = shape.k;
      spec.n = shape.n;
      spec.density = density;
      TimeProblem(MakeProblem(spec, Threads()), options, row);
    }
  }
  *error = FirstCudaError();
  return error->empty();
}

}  // namespace flashquant::bench
