// From a loaded model to what the server answers with: limits, defaults, chat format, description.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/metrics.h"
#include "engine/model/served_model.h"
#include "server/call_submitter.h"
#include "server/metrics_endpoint.h"
#include "server/server_config.h"

namespace flashquant {

// Name of the model in requests: config.model_name, else the last part of the path.
std::string ModelName(const ServerConfig& config);

// Identifies config.json and the start of every weight file (shapes and checksums are there): 8 hex
// digits.
absl::StatusOr<std::string> ModelRevision(const std::string& path);

// `model` and `engine` outlive the result.
absl::StatusOr<std::unique_ptr<const ServingModel>> MakeServingModel(const ServerConfig& config,
                                                                     const ServedModel& model,
                                                                     Engine* engine);

// Sets the metrics that describe the model.
void DescribeModel(const ServedModel& model, const std::string& revision, Metrics* metrics);

// Logs what the memory plan foretold beside what the card gave; the CUDA context is in neither.
// Nothing on the CPU.
void LogGpuMemory(const ServedModel& model);

// Adds the GPU's own metrics; says in a line when its management library is not there.
void WatchGpu(const ServedModel& model, MetricsEndpoint* endpoint);

}  // namespace flashquant
