#include "engine/checkpoint/kernel_plans.h"

#include <cstdint>
#include <filesystem>
#include <limits>
#include <system_error>

#include "engine/checkpoint/json.h"
#include "fmt/format.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kFormatVersion = 1;
constexpr int64_t kMaxPlans = 10'000;
constexpr int64_t kMaxSms = 4096;
constexpr int64_t kMaxRanks = 64;
constexpr int64_t kMaxWarps = 32;
constexpr int64_t kMaxFeatures = std::numeric_limits<int32_t>::max();
constexpr int32_t kRowsPerBlock = 8;
constexpr JsonLimits kLimits = {.max_bytes = int64_t{4} << 20, .max_depth = 4};

absl::StatusOr<TunedPlan> ParsePlan(const nlohmann::json& value, const std::string& where) {
  FQ_ASSIGN_OR_RETURN(const JsonObject object, JsonObject::Create(value, where));
  TunedPlan plan;
  const auto read = [&](const char* key, int64_t min, int64_t max, int32_t* to) -> absl::Status {
    FQ_ASSIGN_OR_RETURN(const int64_t number, object.GetInt(key, min, max));
    *to = static_cast<int32_t>(number);
    return absl::OkStatus();
  };
  int32_t rows = 0;
  FQ_RETURN_IF_ERROR(read("num_sms", 1, kMaxSms, &plan.num_sms));
  FQ_RETURN_IF_ERROR(read("k", 8, kMaxFeatures, &plan.k));
  FQ_RETURN_IF_ERROR(read("n", 8, kMaxFeatures, &plan.n));
  FQ_RETURN_IF_ERROR(read("rows", 8, 32, &rows));
  if (rows != 8 && rows != 16 && rows != 32) {
    return DataLossError("{}: rows: {}; 8, 16 or 32", where, rows);
  }
  plan.batch_blocks = rows / kRowsPerBlock;
  FQ_ASSIGN_OR_RETURN(plan.cluster_join, object.GetBool("cluster"));
  FQ_RETURN_IF_ERROR(read("ranks", 1, kMaxRanks, &plan.num_ranks));
  FQ_RETURN_IF_ERROR(read("warps", 1, kMaxWarps, &plan.num_warps));
  return plan;
}

}  // namespace

absl::StatusOr<std::vector<TunedPlan>> ReadKernelPlans(const std::string& path) {
  FQ_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(path, kLimits));
  FQ_ASSIGN_OR_RETURN(const JsonObject root, JsonObject::Create(json, path));
  FQ_RETURN_IF_ERROR(root.GetInt("format_version", kFormatVersion, kFormatVersion).status());
  FQ_ASSIGN_OR_RETURN(const nlohmann::json* const array, root.GetArray("plans", kMaxPlans));
  std::vector<TunedPlan> plans;
  for (size_t i = 0; i < array->size(); ++i) {
    FQ_ASSIGN_OR_RETURN(const TunedPlan plan,
                        ParsePlan((*array)[i], fmt::format("{}: plans[{}]", path, i)));
    plans.push_back(plan);
  }
  return plans;
}

absl::StatusOr<std::vector<TunedPlan>> ReadModelKernelPlans(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / kKernelPlansFile).string();
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::vector<TunedPlan>();
  return ReadKernelPlans(path);
}

std::string KernelPlansJson(std::span<const TunedPlan> plans) {
  std::string out = fmt::format("{{\"format_version\": {}, \"plans\": [", kFormatVersion);
  for (size_t i = 0; i < plans.size(); ++i) {
    const TunedPlan& plan = plans[i];
    out += fmt::format(
        "{}\n  {{\"num_sms\": {}, \"k\": {}, \"n\": {}, \"rows\": {}, \"ranks\": {}, \"cluster\": "
        "{}, \"warps\": {}}}",
        i == 0 ? "" : ",", plan.num_sms, plan.k, plan.n, plan.batch_blocks * kRowsPerBlock,
        plan.num_ranks, plan.cluster_join, plan.num_warps);
  }
  return out + "\n]}\n";
}

}  // namespace flashquant
