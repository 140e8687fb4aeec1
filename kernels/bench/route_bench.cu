// See route_bench.h.
#include "kernels/bench/route_bench.h"

#include <algorithm>
#include <thread>

#include "kernels/bench/cublas_baseline.h"
#include "kernels/bench/device_memory.cuh"
#include "kernels/bench/graph_timer.h"
#include "kernels/bench/linear_problem.h"
#include "kernels/cuda/backend/linear_route.h"
#include "kernels/cuda/backend/unpack_weight.h"
#include "kernels/cuda/launchers.h"

namespace flashquant::bench {
namespace {

// A first look at an algorithm before it is timed in full.
constexpr GraphTiming kGlance = {4, 3};

int Threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

// Fewer launches where each is long.
GraphTiming TimingFor(double us) {
  if (us > 1000) return {4, 9};
  return us > 200 ? GraphTiming{12, 15} : GraphTiming{};
}

// x, y and scratch of a shape's measurements, for up to `m` rows.
class Scratch {
 public:
  Scratch(const KernelShape& shape, int m) {
    FQ_NOTE_CUDA(cuda::QueryDeviceShape(&device));
    std::vector<uint16_t> values(static_cast<size_t>(m) * static_cast<size_t>(shape.k));
    Random random(5);
    for (uint16_t& value : values) value = ToBf16(random.Normal());
    x = DeviceArray<uint16_t>(values);
    y = DeviceArray<uint16_t>(static_cast<size_t>(m) * static_cast<size_t>(shape.n));
    matrix = DeviceArray<uint16_t>(static_cast<size_t>(shape.k) * static_cast<size_t>(shape.n));
    tables = DeviceArray<cuda::UnpackTables>(std::vector{cuda::MakeUnpackTables()});
  }

  cuda::DeviceShape device;
  DeviceArray<uint16_t> x;
  DeviceArray<uint16_t> y;
  DeviceArray<uint16_t> matrix;
  DeviceArray<cuda::UnpackTables> tables;
};

class RouteBench {
 public:
  RouteBench(const KernelShape& shape, int max_m) : shape_(shape), scratch_(shape, max_m) {}

  double TimeCublas(int m) {
    const int algorithms = cublas_.Prepare(shape_.k, shape_.n, m);
    std::vector<std::pair<double, int>> glances;
    for (int algorithm = 0; algorithm < algorithms && !CudaFailed(); ++algorithm) {
      if (!RunCublas(algorithm, cublas_weights_[0].get(), nullptr)) continue;
      FQ_NOTE_CUDA(cudaDeviceSynchronize());
      const double us = TimeAlgorithm(algorithm, kGlance);
      if (us > 0) glances.emplace_back(us, algorithm);
    }
    std::sort(glances.begin(), glances.end());
    double best = 0;
    for (size_t i = 0; i < std::min<size_t>(2, glances.size()); ++i) {
      const double us = TimeAlgorithm(glances[i].second, TimingFor(glances[i].first));
      if (us > 0 && (best == 0 || us < best)) best = us;
    }
    return best;
  }

  void SetLayer(const cuda::PackedLinear& packed) {
    layout_ = packed.layout;
    layers_ = ColdCopies(DeviceArray<uint8_t>(packed.bytes), NumColdCopies(layout_.num_bytes));
    counters_ = DeviceArray<uint32_t>(static_cast<size_t>(layout_.num_strips));
    counters_.FillBytes(0);
    if (cublas_weights_.empty()) UnpackForCublas();
  }

  double TimePasses(int m, double guess) {
    const auto passes = cuda::ChoosePassPlans(layout_, scratch_.device);
    const cuda::PassPlan& pass = passes[m <= 8 ? 0 : m <= 16 ? 1 : 2];
    if (m > kMaxFusedRows || pass.rows_per_pass == 0) return 0;
    cuda::LinearW4A16Params p;
    p.layout = layout_;
    p.plan = pass.plan;
    p.rows_per_pass = pass.rows_per_pass;
    const DeviceArray<float> workspace(static_cast<size_t>(cuda::LinearW4A16WorkspaceBytes(
                                           layout_, pass.plan, pass.rows_per_pass)) /
                                           4 +
                                       4);
    p.workspace = workspace.get();
    p.counters = counters_.get();
    p.programmatic_launch = true;
    SetActivations(m, &p);
    return TimeLayers(guess, [&](const uint8_t* weight, cudaStream_t stream) {
      p.weight = weight;
      return FQ_NOTE_CUDA(cuda::LaunchLinearW4A16(p, stream));
    });
  }

  double TimeManyRows(int m, double guess) {
    if (m > kMaxFusedRows || !cuda::HasLinearManyRows()) return 0;
    cuda::LinearW4A16Params p;
    p.layout = layout_;
    const DeviceArray<float> workspace(
        static_cast<size_t>(cuda::LinearManyRowsWorkspaceBytes(m, scratch_.device.num_sms)) /
        sizeof(float));
    DeviceArray<uint32_t> counters(static_cast<size_t>(cuda::LinearManyRowsCounters(layout_, m)));
    counters.FillBytes(0);
    p.workspace = workspace.get();
    p.counters = counters.get();
    p.programmatic_launch = true;
    SetActivations(m, &p);
    return TimeLayers(guess, [&](const uint8_t* weight, cudaStream_t stream) {
      p.weight = weight;
      return FQ_NOTE_CUDA(cuda::LaunchLinearManyRows(p, stream));
    });
  }

  double TimeUnpack(int m, double guess) {
    if (cublas_.Prepare(shape_.k, shape_.n, m) == 0) return 0;
    const int32_t at_once = cuda::UnpackStripsAtOnce(layout_);
    return TimeLayers(guess, [&](const uint8_t* weight, cudaStream_t stream) {
      for (int32_t strip = 0; strip < layout_.num_strips; strip += at_once) {
        const cuda::StripRange strips = {strip, std::min(at_once, layout_.num_strips - strip)};
        const int first = strip * cuda::kStripN;
        if (!FQ_NOTE_CUDA(cuda::LaunchUnpackWeight(layout_, weight, scratch_.tables.get(), strips,
                                                   scratch_.matrix.get(), stream)) ||
            !cublas_.RunColumns(first, std::min(strips.count * cuda::kStripN, layout_.n - first),
                                scratch_.matrix.get(), scratch_.x.get(), scratch_.y.get(),
                                stream)) {
          return false;
        }
      }
      return true;
    });
  }

 private:
  // The layer itself: with equal numbers everywhere products of many rows run some 20% faster,
  // because the card needs less power.
  void UnpackForCublas() {
    DeviceArray<uint16_t> first(static_cast<size_t>(shape_.k) * static_cast<size_t>(shape_.n));
    const auto bytes = static_cast<int64_t>(first.bytes());
    FQ_NOTE_CUDA(cuda::LaunchUnpackWeight(layout_, layers_[0].get(), scratch_.tables.get(),
                                          {0, layout_.num_strips}, first.get(), nullptr));
    cublas_weights_ = ColdCopies(std::move(first), NumColdCopies(bytes));
  }
  bool RunCublas(int algorithm, const uint16_t* weight, cudaStream_t stream) {
    return cublas_.Run(algorithm, weight, scratch_.x.get(), scratch_.y.get(), stream);
  }
  double TimeAlgorithm(int algorithm, const GraphTiming& timing) {
    return TimeGraph(
        static_cast<int>(cublas_weights_.size()),
        [&](int i, cudaStream_t stream) {
          return RunCublas(algorithm, cublas_weights_[static_cast<size_t>(i)].get(), stream);
        },
        timing);
  }
  template <typename Params>
  void SetActivations(int m, Params* p) {
    p->x = scratch_.x.get();
    p->y = scratch_.y.get();
    p->x_stride = layout_.k;
    p->y_stride = layout_.n;
    p->m = m;
  }
  // `launch(weight, stream)` for each copy of the layer.
  template <typename Launch>
  double TimeLayers(double guess, Launch&& launch) {
    return TimeGraph(
        static_cast<int>(layers_.size()),
        [&](int i, cudaStream_t stream) {
          return launch(layers_[static_cast<size_t>(i)].get(), stream);
        },
        TimingFor(guess));
  }

  const KernelShape shape_;
  Scratch scratch_;
  CublasBaseline cublas_;
  std::vector<DeviceArray<uint16_t>> cublas_weights_;
  cuda::PackedLayout layout_;
  std::vector<DeviceArray<uint8_t>> layers_;
  DeviceArray<uint32_t> counters_;
};

void TimeShape(const KernelShape& shape, const KernelBenchOptions& options,
               const std::function<void(const RouteTiming&)>& row) {
  RouteBench bench(shape, *std::max_element(options.ms.begin(), options.ms.end()));
  std::vector<double> cublas;  // by options.ms
  for (const double density : options.densities) {
    ProblemSpec spec;
    spec.k = shape.k;
    spec.n = shape.n;
    spec.density = density;
    const Problem problem = MakeProblem(spec, Threads());
    bench.SetLayer(cuda::PackLinear(problem.weight(), problem.outliers(), Threads()));
    if (CudaFailed()) return;
    for (size_t i = 0; i < options.ms.size() && !CudaFailed(); ++i) {
      if (cublas.size() == i) cublas.push_back(bench.TimeCublas(options.ms[i]));
      RouteTiming timing;
      timing.shape = shape;
      timing.m = options.ms[i];
      timing.density = density;
      timing.cublas_us = cublas[i];
      timing.passes_us = bench.TimePasses(timing.m, cublas[i]);
      timing.many_rows_us = bench.TimeManyRows(timing.m, cublas[i]);
      timing.unpack_us = bench.TimeUnpack(timing.m, cublas[i]);
      if (!CudaFailed()) row(timing);
    }
  }
}

}  // namespace

bool TimeRoutes(const KernelBenchOptions& options,
                const std::function<void(const RouteTiming&)>& row, std::string* error) {
  FirstCudaError().clear();
  for (const KernelShape& shape : options.shapes) {
    if (!CudaFailed()) TimeShape(shape, options, row);
  }
  *error = FirstCudaError();
  return error->empty();
}

}  // namespace flashquant::bench
