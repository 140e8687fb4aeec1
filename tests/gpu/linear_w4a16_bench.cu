// Times the fused linear kernel against cuBLAS BF16 and against a streaming read of the same bytes,
// all in one run: cold L2 (copies rotated over more than four times its size), CUDA-graph replay,
// medians. Stand-alone. cuBLAS is opened at run time; without it its columns are empty.
// The plan is the planner's; with --sweep the best of many.
// Options: --shapes KxN,KxN  --m 8,16  --density 0,0.01,0.03  --path bulk|cp_async  --smem KB
//          --no-pdl  --sweep  --no-cublas
#include <cuda_bf16.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "kernels/bench/linear_problem.h"
#include "tests/gpu/cublas_baseline.h"
#include "tests/gpu/device_layer.cuh"

namespace flashquant::gpu_test {

using namespace bench;

namespace {

constexpr int64_t kColdBytes = 256 << 20;
constexpr int kReplays = 25;
constexpr int kMinLaunches = 24;

struct Shape {
  int k = 0;
  int n = 0;
};

struct Options {
  std::vector<Shape> shapes = {{4096, 4096},  {4096, 6144},  {4096, 28672}, {14336, 4096},
                               {5120, 27648}, {13824, 5120}, {14848, 75264}};
  std::vector<int> ms = {8, 16, 32};
  std::vector<double> densities = {0.0, 0.01, 0.03};
  cuda::CopyPath path = cuda::CopyPath::kAuto;
  int shared_kb = 0;
  bool programmatic = true;
  bool sweep = false;
  bool cublas = true;
};

// Median microseconds per launch of a graph that calls launch(0), launch(1), ... in order.
double TimeGraph(int copies, const std::function<void(int, cudaStream_t)>& launch) {
  cudaStream_t stream = nullptr;
  FQ_CUDA_OK(cudaStreamCreate(&stream));
  const int launches = (std::max(kMinLaunches, copies) + copies - 1) / copies * copies;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  FQ_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) launch(i % copies, stream);
  FQ_CUDA_OK(cudaStreamEndCapture(stream, &graph));
  FQ_CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  FQ_CUDA_OK(cudaEventCreate(&begin));
  FQ_CUDA_OK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kReplays + 3; ++i) {
    FQ_CUDA_OK(cudaEventRecord(begin, stream));
    FQ_CUDA_OK(cudaGraphLaunch(exec, stream));
    FQ_CUDA_OK(cudaEventRecord(end, stream));
    FQ_CUDA_OK(cudaEventSynchronize(end));
    float ms = 0.0f;
    FQ_CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  FQ_CUDA_OK(cudaEventDestroy(begin));
  FQ_CUDA_OK(cudaEventDestroy(end));
  FQ_CUDA_OK(cudaGraphExecDestroy(exec));
  FQ_CUDA_OK(cudaGraphDestroy(graph));
  FQ_CUDA_OK(cudaStreamDestroy(stream));
  return times[times.size() / 2] * 1e3 / launches;
}

int NumCopies(int64_t bytes) {
  return static_cast<int>(std::max<int64_t>(2, (kColdBytes + bytes - 1) / bytes));
}

__global__ void __launch_bounds__(512) StreamKernel(const uint4* data, int64_t count, uint4* sink) {
  uint4 sum = {0, 0, 0, 0};
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum.x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += stride) sum.x ^= __ldcs(data + i).x;
  if (sum.x == 0x12345678u) *sink = sum;  // keeps the loads
}

// A read of `bytes` by the best of a few grids.
double TimeStream(int64_t bytes, int num_sms) {
  const int copies = NumCopies(bytes);
  std::vector<DeviceArray<uint8_t>> data;
  for (int i = 0; i < copies; ++i) {
    data.emplace_back(static_cast<size_t>(bytes));
    data.back().FillBytes(i + 1);
  }
  DeviceArray<uint4> sink(1);
  double best = 1e9;
  for (int per_sm : {2, 4, 8}) {
    best = std::min(best, TimeGraph(copies, [&](int i, cudaStream_t stream) {
                      StreamKernel<<<static_cast<unsigned>(num_sms * per_sm), 512, 0, stream>>>(
                          reinterpret_cast<const uint4*>(data[static_cast<size_t>(i)].get()),
                          bytes / 16, sink.get());
                    }));
  }
  return best;
}

struct Measured {
  double us = 1e9;
  cuda::LinearPlan plan;
  int smem_kb = 0;
};

// The packed layer, its copies, and the best time over the plans asked for.
class Layer {
 public:
  Layer(const Shape& shape, double density, int threads) {
    ProblemSpec spec;
    spec.k = shape.k;
    spec.n = shape.n;
    spec.density = density;
    const Problem problem = MakeProblem(spec, threads);
    cuda::PackedLinear packed = cuda::PackLinear(problem.weight(), problem.outliers(), threads);
    layout_ = packed.layout;
    copies_.emplace_back(packed.bytes);
    for (int i = 1; i < NumCopies(bytes()); ++i) copies_.push_back(copies_[0].Clone());
  }

  int64_t bytes() const { return layout_.num_bytes; }

  Measured Time(const Options& options, int m, const uint16_t* x, uint16_t* y) {
    Measured best;
    for (const Measured& config : Configurations(options, m)) {
      Measured result = config;
      result.us = TimeOne(options, m, config, x, y);
      if (options.sweep && result.us < 1e8) {
        std::printf("  sweep %dx%d m%d ranks %d splits %d warps %d%s smem %d KB: %.2f us\n",
                    layout_.k, layout_.n, m, config.plan.num_ranks, config.plan.num_splits,
                    config.plan.num_warps, config.plan.cluster_join ? " cluster" : "",
                    config.smem_kb, result.us);
      }
      if (result.us < best.us) best = result;
    }
    return best;
  }

 private:
  // The planner's choice, or with --sweep many plans.
  std::vector<Measured> Configurations(const Options& options, int m) const {
    cuda::DeviceShape device = ThisDevice();
    if (options.shared_kb != 0) device.shared_bytes = options.shared_kb * 1024;
    if (options.path == cuda::CopyPath::kCpAsync) device.max_clusters = {};
    std::vector<Measured> configs;
    if (!options.sweep) {
      configs.push_back(
          {1e9, cuda::ChooseLinearPlan(layout_, m, device), device.shared_bytes / 1024});
      return configs;
    }
    for (int ranks = 1; ranks <= cuda::kMaxClusterRanks; ++ranks) {
      for (const bool cluster : {true, false}) {
        if (ranks > layout_.num_units || (cluster && ranks == 1)) continue;
        const int most =
            std::min(layout_.num_strips, cluster ? device.max_clusters[static_cast<size_t>(ranks)]
                                                 : device.num_sms / ranks);
        if (most < 1) continue;
        const int strips = (layout_.num_strips + most - 1) / most;
        for (int warps : {8, 9, 10, 12, 14, 15, 16}) {
          if (m > 16 && warps > 12) continue;
          cuda::LinearPlan plan;
          plan.num_ranks = ranks;
          plan.num_splits = (layout_.num_strips + strips - 1) / strips;
          plan.num_warps = warps;
          plan.cluster_join = cluster;
          configs.push_back({1e9, plan, device.shared_bytes / 1024});
        }
      }
    }
    return configs;
  }

  double TimeOne(const Options& options, int m, const Measured& config, const uint16_t* x,
                 uint16_t* y) {
    if (config.plan.num_splits < 1) return 1e9;
    const DeviceScratch scratch(layout_, config.plan, m);
    auto params = [&](size_t i) {
      cuda::LinearW4A16Params p = LayerParams(layout_, copies_[i].get(), config.plan, scratch);
      p.x = x;
      p.y = y;
      p.x_stride = layout_.k;
      p.y_stride = layout_.n;
      p.m = m;
      p.path = options.path;
      p.programmatic_launch = options.programmatic;
      p.shared_bytes_limit = config.smem_kb * 1024;
      return p;
    };
    if (cuda::LaunchLinearW4A16(params(0), nullptr) != cudaSuccess) {
      (void)cudaGetLastError();
      return 1e9;
    }
    FQ_CUDA_OK(cudaDeviceSynchronize());
    return TimeGraph(static_cast<int>(copies_.size()), [&](int i, cudaStream_t stream) {
      FQ_CUDA_OK(cuda::LaunchLinearW4A16(params(static_cast<size_t>(i)), stream));
    });
  }

  cuda::PackedLayout layout_;
  std::vector<DeviceArray<uint8_t>> copies_;
};

double TimeCublas(CublasBaseline& cublas, const Shape& shape, int m, const uint16_t* x,
                  uint16_t* y) {
  const int64_t bytes = int64_t{shape.k} * shape.n * 2;
  std::vector<DeviceArray<uint8_t>> weights;
  for (int i = 0; i < NumCopies(bytes); ++i) {
    weights.emplace_back(static_cast<size_t>(bytes));
    weights.back().FillBytes(0x3c);
  }
  double best = 1e9;
  for (int algorithm = 0; algorithm < cublas.Prepare(shape.k, shape.n, m); ++algorithm) {
    if (!cublas.Run(algorithm, weights[0].get(), x, y, nullptr)) continue;
    FQ_CUDA_OK(cudaDeviceSynchronize());
    best = std::min(best, TimeGraph(static_cast<int>(weights.size()), [&](int i, cudaStream_t s) {
                      cublas.Run(algorithm, weights[static_cast<size_t>(i)].get(), x, y, s);
                    }));
  }
  return best;
}

void Run(const Options& options) {
  int num_sms = 0;
  cudaDeviceProp device = {};
  FQ_CUDA_OK(cudaGetDeviceProperties(&device, 0));
  num_sms = device.multiProcessorCount;
  for (int ranks = 2; ranks <= cuda::kMaxClusterRanks; ++ranks) {
    std::printf("clusters of %d: %d; ", ranks,
                ThisDevice().max_clusters[static_cast<size_t>(ranks)]);
  }
  std::printf("%s, %d SMs; times in us, cold L2, graph replay, medians of %d\n", device.name,
              num_sms, kReplays);
  const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  DeviceArray<uint16_t> x(size_t{64} * 32768);
  DeviceArray<uint16_t> y(size_t{64} * 131072);
  std::vector<uint16_t> host_x(x.count());
  Random random(5);
  for (uint16_t& v : host_x) v = ToBf16(random.Normal());
  FQ_CUDA_OK(cudaMemcpy(x.get(), host_x.data(), x.bytes(), cudaMemcpyHostToDevice));
  CublasBaseline cublas;
  std::vector<std::string> table;
  std::vector<std::vector<double>> logs(options.ms.size() * options.densities.size());
  std::vector<std::vector<double>> cublas_us;
  for (const Shape& shape : options.shapes) {
    std::vector<double> row;
    for (int m : options.ms) {
      row.push_back(options.cublas ? TimeCublas(cublas, shape, m, x.get(), y.get()) : 0.0);
    }
    cublas_us.push_back(row);
  }
  for (size_t s = 0; s < options.shapes.size(); ++s) {
    for (size_t d = 0; d < options.densities.size(); ++d) {
      Layer layer(options.shapes[s], options.densities[d], threads);
      const double stream = TimeStream(layer.bytes(), num_sms);
      for (size_t i = 0; i < options.ms.size(); ++i) {
        const Measured best = layer.Time(options, options.ms[i], x.get(), y.get());
        const double ratio = cublas_us[s][i] / best.us;
        logs[i * options.densities.size() + d].push_back(std::log(ratio));
        char line[256];
        std::snprintf(
            line, sizeof(line),
            "%6dx%-6d %3d %5.1f%% | %8.2f %6.0f GB/s %5.1f%% of stream %8.2f | cuBLAS "
            "%8.2f %5.2fx | ranks %d%s splits %d warps %d smem %d",
            options.shapes[s].k, options.shapes[s].n, options.ms[i], options.densities[d] * 100,
            best.us, static_cast<double>(layer.bytes()) / best.us * 1e-3, 100 * stream / best.us,
            stream, cublas_us[s][i], ratio, best.plan.num_ranks, best.plan.cluster_join ? "c" : "",
            best.plan.num_splits, best.plan.num_warps, best.smem_kb);
        std::printf("%s\n", line);
        std::fflush(stdout);
        table.emplace_back(line);
      }
    }
  }
  std::printf("\n");
  for (const std::string& line : table) std::printf("%s\n", line.c_str());
  for (size_t i = 0; i < options.ms.size(); ++i) {
    for (size_t d = 0; d < options.densities.size(); ++d) {
      double sum = 0.0;
      const auto& values = logs[i * options.densities.size() + d];
      for (double v : values) sum += v;
      std::printf("geometric mean vs cuBLAS, m %d, %.1f%%: %.2fx\n", options.ms[i],
                  options.densities[d] * 100, std::exp(sum / static_cast<double>(values.size())));
    }
  }
}

template <typename T, typename Parse>
std::vector<T> ParseList(const std::string& text, Parse&& parse) {
  std::vector<T> out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    out.push_back(parse(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return out;
}

bool ParseOptions(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--sweep") {
      options->sweep = true;
      continue;
    }
    if (name == "--no-cublas") {
      options->cublas = false;
      continue;
    }
    if (name == "--no-pdl") {
      options->programmatic = false;
      continue;
    }
    if (i + 1 >= argc) return false;
    const std::string value = argv[++i];
    if (name == "--shapes") {
      options->shapes = ParseList<Shape>(value, [](const std::string& s) {
        Shape shape;
        std::sscanf(s.c_str(), "%dx%d", &shape.k, &shape.n);
        return shape;
      });
    } else if (name == "--m") {
      options->ms =
          ParseList<int>(value, [](const std::string& s) { return std::atoi(s.c_str()); });
    } else if (name == "--density") {
      options->densities =
          ParseList<double>(value, [](const std::string& s) { return std::atof(s.c_str()); });
    } else if (name == "--path") {
      options->path = value == "cp_async" ? cuda::CopyPath::kCpAsync : cuda::CopyPath::kBulk;
    } else if (name == "--smem") {
      options->shared_kb = std::atoi(value.c_str());
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace flashquant::gpu_test

int main(int argc, char** argv) {
  flashquant::gpu_test::Options options;
  if (!flashquant::gpu_test::ParseOptions(argc, argv, &options)) {
    std::fprintf(stderr, "unknown or incomplete option; see the head of the source file\n");
    return 2;
  }
  flashquant::gpu_test::Run(options);
  return 0;
}
