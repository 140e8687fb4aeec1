// See kernel_bench.h.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <thread>

#include "kernels/bench/csr_matrix.h"
#include "kernels/bench/cublas_baseline.h"
#include "kernels/bench/cusparse_baseline.h"
#include "kernels/bench/device_memory.cuh"
#include "kernels/bench/graph_timer.h"
#include "kernels/bench/kernel_bench.h"
#include "kernels/bench/linear_problem.h"
#include "kernels/bench/slot_order.h"
#include "kernels/cuda/backend/linear_route.h"
#include "kernels/cuda/launchers.h"

namespace flashquant::bench {
namespace {

int Threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

// What of the device the options leave to the kernel.
cuda::DeviceShape UsableDevice(const KernelBenchOptions& options) {
  cuda::DeviceShape device;
  FQ_NOTE_CUDA(cuda::QueryDeviceShape(&device));
  if (options.shared_kb != 0) device.shared_bytes = options.shared_kb * 1024;
  if (!options.clusters || options.copies == WeightCopies::kCpAsync) device.max_clusters = {};
  return device;
}

cuda::CopyPath PathOf(WeightCopies copies) {
  switch (copies) {
    case WeightCopies::kBulk:
      return cuda::CopyPath::kBulk;
    case WeightCopies::kCpAsync:
      return cuda::CopyPath::kCpAsync;
    case WeightCopies::kAuto:
      break;
  }
  return cuda::CopyPath::kAuto;
}

// x and y of all measurements.
struct Activations {
  DeviceArray<uint16_t> x;
  DeviceArray<uint16_t> y;
};

Activations MakeActivations(const KernelBenchOptions& options) {
  int m = 1;
  int k = 1;
  int n = 1;
  for (const int rows : options.ms) m = std::max(m, rows);
  for (const KernelShape& shape : options.shapes) {
    k = std::max(k, shape.k);
    n = std::max(n, shape.n);
  }
  std::vector<uint16_t> x(static_cast<size_t>(m) * static_cast<size_t>(k));
  Random random(5);
  for (uint16_t& value : x) value = ToBf16(random.Normal());
  Activations out;
  out.x = DeviceArray<uint16_t>(x);
  out.y = DeviceArray<uint16_t>(static_cast<size_t>(m) * static_cast<size_t>(n));
  return out;
}

// A packed layer, its copies, and what launches of it need.
class Layer {
 public:
  Layer(const cuda::PackedLinear& packed, const KernelBenchOptions& options)
      : options_(options),
        device_(UsableDevice(options)),
        layout_(packed.layout),
        copies_(ColdCopies(DeviceArray<uint8_t>(packed.bytes), NumColdCopies(layout_.num_bytes))) {}

  int64_t bytes() const { return layout_.num_bytes; }
  int num_copies() const { return static_cast<int>(copies_.size()); }

  // Fills in `us` and `plan`: those of the planner's choice, or of the best of many.
  void Time(const Activations& activations, KernelTiming* timing) {
    for (const cuda::LinearPlan& plan : Plans(timing->m)) {
      UsePlan(plan, timing->m);
      const double us = TimeGraph(num_copies(), [&](int i, cudaStream_t stream) {
        return Launch(i, activations, timing->m, stream);
      });
      const std::string text = UsesManyRows(timing->m) ? "many rows" : PlanText(plan);
      if (options_.sweep && options_.print_sweep && us > 0) {
        std::printf("  sweep %dx%d m %d %s: %.2f us\n", layout_.k, layout_.n, timing->m,
                    text.c_str(), us);
      }
      if (us > 0 && (timing->us == 0 || us < timing->us)) {
        timing->us = us;
        timing->plan = text;
        timing->best = plan;
        timing->num_sms = device_.num_sms;
      }
    }
  }

  void UsePlannersChoice(int m) {
    UsePlan(cuda::ChooseLinearPlan(layout_, PassRows(m), device_), m);
  }

  bool Launch(int copy, const Activations& activations, int m, cudaStream_t stream) {
    if (plan_.num_splits < 1) return false;
    cuda::LinearW4A16Params p;
    p.layout = layout_;
    p.weight = copies_[static_cast<size_t>(copy)].get();
    p.plan = plan_;
    p.workspace = workspace_.get();
    p.counters = counters_.get();
    p.x = activations.x.get();
    p.y = activations.y.get();
    p.x_stride = layout_.k;
    p.y_stride = layout_.n;
    p.m = m;
    p.path = PathOf(options_.copies);
    p.programmatic_launch = options_.programmatic;
    p.shared_bytes_limit = device_.shared_bytes;
    return (UsesManyRows(m) ? cuda::LaunchLinearManyRows(p, stream)
                            : cuda::LaunchLinearW4A16(p, stream)) == cudaSuccess;
  }

 private:
  static int PassRows(int m) { return std::min(m, 32); }

  // As the backend does, unless the options ask for something of the passes.
  bool UsesManyRows(int m) const {
    const bool free = options_.copies == WeightCopies::kAuto && options_.shared_kb == 0 &&
                      options_.clusters && !options_.sweep;
    const cuda::FusedRows rows = cuda::ChooseFusedRows(cuda::HasLinearManyRows());
    return free && m > rows.passes && m <= rows.many_rows;
  }

  std::string PlanText(const cuda::LinearPlan& plan) const {
    return "ranks " + std::to_string(plan.num_ranks) + (plan.cluster_join ? "c" : "") + " splits " +
           std::to_string(plan.num_splits) + " warps " + std::to_string(plan.num_warps);
  }

  void UsePlan(const cuda::LinearPlan& plan, int m) {
    plan_ = plan;
    if (plan.num_splits < 1) return;
    int64_t workspace_bytes = cuda::LinearW4A16WorkspaceBytes(layout_, plan, m);
    int64_t counters = layout_.num_strips;
    if (UsesManyRows(m)) {
      workspace_bytes = cuda::LinearManyRowsWorkspaceBytes(m, device_.num_sms);
      counters = cuda::LinearManyRowsCounters(layout_, m);
    }
    workspace_ = DeviceArray<float>(static_cast<size_t>(workspace_bytes) / sizeof(float) + 4);
    counters_ = DeviceArray<uint32_t>(static_cast<size_t>(counters));
    counters_.FillBytes(0);
  }

  std::vector<cuda::LinearPlan> Plans(int m) const {
    if (!options_.sweep) return {cuda::ChooseLinearPlan(layout_, PassRows(m), device_)};
    std::vector<cuda::LinearPlan> plans;
    for (int ranks = 1; ranks <= std::min(cuda::kMaxClusterRanks, layout_.num_units); ++ranks) {
      for (const bool cluster : {true, false}) {
        if (cluster && ranks == 1) continue;
        const int at_once =
            cluster ? device_.max_clusters[static_cast<size_t>(ranks)] : device_.num_sms / ranks;
        const int most = std::min(layout_.num_strips, at_once);
        if (most < 1) continue;
        const int strips = (layout_.num_strips + most - 1) / most;
        for (int warps = 6; warps <= cuda::kMaxWarpsPerBlock; ++warps) {
          const SweptPlan& only = options_.only;
          if (only.ranks > 0 &&
              (ranks != only.ranks || cluster != only.cluster || warps != only.warps)) {
            continue;
          }
          cuda::LinearPlan plan;
          plan.num_ranks = ranks;
          plan.num_splits = (layout_.num_strips + strips - 1) / strips;
          plan.num_warps = warps;
          plan.cluster_join = cluster;
          plans.push_back(plan);
        }
      }
    }
    return plans;
  }

  const KernelBenchOptions& options_;
  const cuda::DeviceShape device_;
  const cuda::PackedLayout layout_;
  std::vector<DeviceArray<uint8_t>> copies_;
  cuda::LinearPlan plan_;
  DeviceArray<float> workspace_;
  DeviceArray<uint32_t> counters_;
};

double TimeCublas(CublasBaseline& cublas, const KernelShape& shape, int m,
                  const Activations& activations) {
  const int64_t bytes = int64_t{shape.k} * shape.n * 2;
  DeviceArray<uint8_t> first(static_cast<size_t>(bytes));
  first.FillBytes(0x3c);
  const auto weights = ColdCopies(std::move(first), NumColdCopies(bytes));
  const auto run = [&](int algorithm, int i, cudaStream_t stream) {
    return cublas.Run(algorithm, weights[static_cast<size_t>(i)].get(), activations.x.get(),
                      activations.y.get(), stream);
  };
  double best = 0;
  const int num_algorithms = cublas.Prepare(shape.k, shape.n, m);
  for (int algorithm = 0; algorithm < num_algorithms && !CudaFailed(); ++algorithm) {
    if (!run(algorithm, 0, nullptr)) continue;
    FQ_NOTE_CUDA(cudaDeviceSynchronize());
    const double us = TimeGraph(static_cast<int>(weights.size()), [&](int i, cudaStream_t stream) {
      return run(algorithm, i, stream);
    });
    if (us > 0 && (best == 0 || us < best)) best = us;
  }
  return best;
}

// The dense-only layer of a shape and the outliers in CSR.
class Unfused {
 public:
  Unfused(const Problem& problem, const KernelBenchOptions& options)
      : dense_(cuda::PackLinear(problem.weight(), {}, Threads()), options) {}

  void SetOutliers(const Problem& problem) {
    const CsrMatrix csr = ToCsr(problem.outliers(), problem.spec.k, problem.spec.n);
    row_begin_ = ColdCopies(DeviceArray<int32_t>(csr.row_begin), dense_.num_copies());
    column_ = ColdCopies(DeviceArray<int32_t>(csr.column), dense_.num_copies());
    value_ = ColdCopies(DeviceArray<uint16_t>(csr.value), dense_.num_copies());
    copies_.clear();
    for (size_t i = 0; i < row_begin_.size() && !CudaFailed(); ++i) {
      copies_.push_back({csr.rows, csr.columns, static_cast<int64_t>(csr.value.size()),
                         row_begin_[i].get(), column_[i].get(), value_[i].get()});
    }
  }

  double TimeDense(const Activations& activations, int m) {
    KernelTiming timing;
    timing.m = m;
    dense_.Time(activations, &timing);
    return timing.us;
  }

  double TimeBoth(CusparseBaseline& cusparse, const Activations& activations, int m) {
    dense_.UsePlannersChoice(m);
    double best = 0;
    for (int algorithm = 0; algorithm < CusparseBaseline::kNumAlgorithms; ++algorithm) {
      if (!cusparse.Prepare(algorithm, copies_, m, activations.x.get(), activations.y.get())) {
        continue;
      }
      if (!cusparse.Run(0, nullptr)) continue;
      FQ_NOTE_CUDA(cudaDeviceSynchronize());
      const double us = TimeGraph(dense_.num_copies(), [&](int i, cudaStream_t stream) {
        return dense_.Launch(i, activations, m, stream) && cusparse.Run(i, stream);
      });
      if (us > 0 && (best == 0 || us < best)) best = us;
    }
    return best;
  }

 private:
  Layer dense_;
  std::vector<DeviceArray<int32_t>> row_begin_;
  std::vector<DeviceArray<int32_t>> column_;
  std::vector<DeviceArray<uint16_t>> value_;
  std::vector<CsrPointers> copies_;
};

class KernelBench {
 public:
  KernelBench(const KernelBenchOptions& options,
              const std::function<void(const KernelTiming&)>& row)
      : options_(options), row_(row), activations_(MakeActivations(options)) {}

  void TimeShape(const KernelShape& shape) {
    cublas_us_.clear();
    dense_us_.clear();
    unfused_.reset();
    for (const int m : options_.ms) {
      cublas_us_.push_back(options_.cublas ? TimeCublas(cublas_, shape, m, activations_) : 0);
    }
    for (const double density : options_.densities) {
      if (CudaFailed()) return;
      ProblemSpec spec;
      spec.k = shape.k;
      spec.n = shape.n;
      spec.density = density;
      TimeProblem(shape, MakeProblem(spec, Threads()));
    }
  }

 private:
  void TimeProblem(const KernelShape& shape, const Problem& problem) {
    if (options_.unfused && unfused_ == nullptr) {
      unfused_ = std::make_unique<Unfused>(problem, options_);
      for (const int m : options_.ms) dense_us_.push_back(unfused_->TimeDense(activations_, m));
    }
    const bool has_outliers = !problem.records.empty();
    if (options_.unfused && has_outliers) unfused_->SetOutliers(problem);
    cuda::PackedLinear packed = cuda::PackLinear(problem.weight(), problem.outliers(), Threads());
    if (!options_.bank_order) OrderSlotsByPosition(packed);
    Layer layer(packed, options_);
    const double stream_us = TimeStream(layer.bytes());
    for (size_t i = 0; i < options_.ms.size() && !CudaFailed(); ++i) {
      KernelTiming timing;
      timing.shape = shape;
      timing.m = options_.ms[i];
      timing.density = problem.spec.density;
      timing.bytes = layer.bytes();
      timing.stream_us = stream_us;
      timing.cublas_us = cublas_us_[i];
      layer.Time(activations_, &timing);
      if (options_.unfused) {
        timing.dense_us = dense_us_[i];
        timing.unfused_us =
            has_outliers ? unfused_->TimeBoth(cusparse_, activations_, timing.m) : dense_us_[i];
      }
      if (!CudaFailed()) row_(timing);
    }
  }

  const KernelBenchOptions& options_;
  const std::function<void(const KernelTiming&)>& row_;
  const Activations activations_;
  CublasBaseline cublas_;
  CusparseBaseline cusparse_;
  std::vector<double> cublas_us_;  // by options_.ms
  std::vector<double> dense_us_;
  std::unique_ptr<Unfused> unfused_;
};

}  // namespace

bool DescribeBenchDevice(std::string* description, std::string* error) {
  FirstCudaError().clear();
  cudaDeviceProp device = {};
  int driver = 0;
  if (!NoteCuda(cudaGetDeviceProperties(&device, 0), "no usable CUDA device") ||
      !FQ_NOTE_CUDA(cudaDriverGetVersion(&driver))) {
    *error = FirstCudaError();
    return false;
  }
  *description = std::string(device.name) + ", " + std::to_string(device.multiProcessorCount) +
                 " SMs, compute capability " + std::to_string(device.major) + "." +
                 std::to_string(device.minor) + ", CUDA driver " + std::to_string(driver / 1000) +
                 "." + std::to_string(driver % 1000 / 10);
  return true;
}

bool TimeKernels(const KernelBenchOptions& options,
                 const std::function<void(const KernelTiming&)>& row, std::string* error) {
  FirstCudaError().clear();
  {
    KernelBench bench(options, row);
    for (const KernelShape& shape : options.shapes) {
      if (CudaFailed()) break;
      bench.TimeShape(shape);
    }
  }
  *error = FirstCudaError();
  return error->empty();
}

}  // namespace flashquant::bench
