#include "kernels/cuda/backend/recorded_ops.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/backend/cuda_status.h"

namespace flashquant::cuda {

absl::Status RecordedOps::Run(const void* owner, int64_t key,
                              const std::function<absl::Status()>& queue) {
  const auto place = graphs_.find({owner, key});
  if (place != graphs_.end()) return ToStatus(cudaGraphLaunch(place->second, stream_), "graph");
  FQ_RETURN_IF_ERROR(queue());
  cudaGraphExec_t graph = nullptr;
  FQ_RETURN_IF_ERROR(Record(queue, &graph));
  graphs_[{owner, key}] = graph;
  return absl::OkStatus();
}

absl::Status RecordedOps::Record(const std::function<absl::Status()>& queue,
                                 cudaGraphExec_t* graph) {
  FQ_RETURN_IF_ERROR(
      ToStatus(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "graph capture"));
  absl::Status status = queue();
  cudaGraph_t recorded = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream_, &recorded);
  if (status.ok()) status = ToStatus(ended, "graph capture");
  if (status.ok()) status = ToStatus(cudaGraphInstantiate(graph, recorded, 0), "graph");
  if (recorded != nullptr) cudaGraphDestroy(recorded);
  if (status.ok()) status = ToStatus(cudaGraphUpload(*graph, stream_), "graph");
  return status;
}

void RecordedOps::Clear() {
  if (graphs_.empty()) return;
  cudaStreamSynchronize(stream_);
  for (const auto& [key, graph] : graphs_) cudaGraphExecDestroy(graph);
  graphs_.clear();
}

}  // namespace flashquant::cuda
