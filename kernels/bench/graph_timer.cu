// See graph_timer.h.
#include "kernels/bench/graph_timer.h"

#include <algorithm>
#include <vector>

#include "kernels/bench/device_memory.cuh"

namespace flashquant::bench {
namespace {

constexpr int kWarmUps = 3;

// Reads everything and keeps the compiler from leaving that out.
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
  if (sum.x == 0x12345678u) *sink = sum;
}

// A stream, two events and an instantiated graph, freed at the end.
class GraphRun {
 public:
  GraphRun() {
    FQ_NOTE_CUDA(cudaStreamCreate(&stream_));
    FQ_NOTE_CUDA(cudaEventCreate(&begin_));
    FQ_NOTE_CUDA(cudaEventCreate(&end_));
  }
  GraphRun(const GraphRun&) = delete;
  GraphRun& operator=(const GraphRun&) = delete;
  ~GraphRun() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  bool Capture(int launches, int copies, const std::function<bool(int, cudaStream_t)>& launch) {
    if (CudaFailed()) return false;
    if (!FQ_NOTE_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal))) {
      return false;
    }
    bool good = true;
    for (int i = 0; i < launches && good; ++i) good = launch(i % copies, stream_);
    const cudaError_t error = cudaStreamEndCapture(stream_, &graph_);
    if (!good) {
      (void)cudaGetLastError();
      return false;
    }
    return NoteCuda(error, "capturing a graph") &&
           FQ_NOTE_CUDA(cudaGraphInstantiate(&exec_, graph_, 0));
  }

  double Milliseconds() {
    float ms = 0.0f;
    FQ_NOTE_CUDA(cudaEventRecord(begin_, stream_));
    FQ_NOTE_CUDA(cudaGraphLaunch(exec_, stream_));
    FQ_NOTE_CUDA(cudaEventRecord(end_, stream_));
    FQ_NOTE_CUDA(cudaEventSynchronize(end_));
    FQ_NOTE_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return double{ms};
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace

double TimeGraph(int copies, const std::function<bool(int, cudaStream_t)>& launch,
                 const GraphTiming& timing) {
  const int launches = (std::max(timing.min_launches, copies) + copies - 1) / copies * copies;
  GraphRun run;
  if (!run.Capture(launches, copies, launch)) return 0;
  std::vector<double> times;
  for (int i = 0; i < timing.replays + kWarmUps && !CudaFailed(); ++i) {
    const double ms = run.Milliseconds();
    if (i >= kWarmUps) times.push_back(ms);
  }
  if (CudaFailed()) return 0;
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3 / launches;
}

double TimeStream(int64_t bytes) {
  int num_sms = 0;
  FQ_NOTE_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  DeviceArray<uint8_t> first(static_cast<size_t>(bytes));
  first.FillBytes(1);
  const auto data = ColdCopies(std::move(first), NumColdCopies(bytes));
  const DeviceArray<uint4> sink(1);
  double best = 0;
  for (const int per_sm : {2, 4, 8}) {
    const double us = TimeGraph(static_cast<int>(data.size()), [&](int i, cudaStream_t stream) {
      StreamKernel<<<static_cast<unsigned>(num_sms * per_sm), 512, 0, stream>>>(
          reinterpret_cast<const uint4*>(data[static_cast<size_t>(i)].get()), bytes / 16,
          sink.get());
      return FQ_NOTE_CUDA(cudaGetLastError());
    });
    if (us > 0 && (best == 0 || us < best)) best = us;
  }
  return best;
}

}  // namespace flashquant::bench
