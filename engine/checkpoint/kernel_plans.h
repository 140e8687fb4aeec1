// The file of kernel plans that `flashquant bench tune` writes: how the fused GPU kernel is best
// spread over the user's own card, for the shapes of a model. Loading a model reads
// kernel_plans.json in its folder. Plans that the card or a layer has no room for are passed over
// by the planner; a wrong plan costs time, never a result.
//
//   {"format_version": 1, "plans": [{"num_sms": 132, "k": 4096, "n": 6144, "rows": 8, "ranks": 4,
//                                    "cluster": true, "warps": 12}, ...]}
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/tuned_plan.h"

namespace flashquant {

inline constexpr char kKernelPlansFile[] = "kernel_plans.json";

// Status of ReadJsonFile; DATA_LOSS naming the plan and the key for what is missing or impossible.
absl::StatusOr<std::vector<TunedPlan>> ReadKernelPlans(const std::string& path);
// Those of a model's folder; none when it has no such file.
absl::StatusOr<std::vector<TunedPlan>> ReadModelKernelPlans(const std::string& folder);

// As text, a plan a line.
std::string KernelPlansJson(std::span<const TunedPlan> plans);

}  // namespace flashquant
