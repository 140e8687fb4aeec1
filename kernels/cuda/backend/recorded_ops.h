// RecordedOps: sequences of ops as CUDA graphs, by the caller's key. Used from one thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "absl/status/status.h"

namespace flashquant::cuda {

class RecordedOps final {
 public:
  explicit RecordedOps(cudaStream_t stream) : stream_(stream) {}
  ~RecordedOps() { Clear(); }
  RecordedOps(const RecordedOps&) = delete;
  RecordedOps& operator=(const RecordedOps&) = delete;

  // Backend::RunRecorded: the first time the ops run as they are queued, so that whatever they set
  // up once is there, and are then recorded.
  absl::Status Run(const void* owner, int64_t key, const std::function<absl::Status()>& queue);
  void Clear();

 private:
  absl::Status Record(const std::function<absl::Status()>& queue, cudaGraphExec_t* graph);

  const cudaStream_t stream_;
  std::map<std::pair<const void*, int64_t>, cudaGraphExec_t> graphs_;
};

}  // namespace flashquant::cuda
