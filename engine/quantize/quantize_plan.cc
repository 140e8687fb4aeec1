// One pass over the names; layers are collected first, because the group size depends on all of
// them.
#include "engine/quantize/quantize_plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/json.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "engine/quantize/gptq_import.h"
#include "engine/quantize/matrix_quantizer.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr std::string_view kWeightSuffix = ".weight";
// Of OPT the second.
constexpr std::string_view kEmbeddings[] = {"model.embed_tokens.weight",
                                            "model.decoder.embed_tokens.weight"};
constexpr std::string_view kHead = "lm_head.weight";
constexpr std::array<int64_t, 3> kGroupSizes = {128, 64, 32};
// More padding than this costs more than INT4 saves over BF16's next best use of the bytes.
constexpr double kMaxPaddingRatio = 1.25;

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

bool IsLinearLayer(const TensorInfo& tensor) {
  return tensor.shape.size() == 2 && IsFloat(tensor.dtype) &&
         tensor.name.ends_with(kWeightSuffix) && tensor.name.find(".layers.") != std::string::npos;
}

std::string WithoutWeightSuffix(const std::string& name) {
  return name.substr(0, name.size() - kWeightSuffix.size());
}

absl::Status CheckOptions(const QuantizeOptions& options) {
  if (options.group_size.has_value()) {
    const int64_t group = *options.group_size;
    if (group != -1 &&
        std::find(kGroupSizes.begin(), kGroupSizes.end(), group) == kGroupSizes.end()) {
      return InvalidArgumentError("--group-size: must be auto, 32, 64, 128 or -1 (got {})", group);
    }
  }
  if (!(options.density >= 0 && options.density <= kMaxDensity)) {
    return InvalidArgumentError("--density: must be 0..{} (got {})", kMaxDensity, options.density);
  }
  if (!(options.threshold >= 0 && options.threshold <= kMaxThreshold)) {
    return InvalidArgumentError("--threshold: must be 0..{} (got {})", kMaxThreshold,
                                options.threshold);
  }
  if (options.target_bytes > 0 && (options.group_size == -1 || options.imported != nullptr)) {
    return InvalidArgumentError(
        "--target-size: not with --group-size -1 and not with a GPTQ checkpoint's codes");
  }
  if (!(options.damping > 0 && options.damping <= 1)) {
    return InvalidArgumentError("--damping: must be above 0, at most 1 (got {})", options.damping);
  }
  if (options.embedding == TableFormat::kInt4) {
    return InvalidArgumentError("--embedding: must be bf16 or int8 (got int4)");
  }
  return absl::OkStatus();
}

absl::Status CheckMatrix(const TensorInfo& tensor) {
  if (tensor.shape.size() != 2 || !IsFloat(tensor.dtype)) {
    return DataLossError("tensor {}: must be a matrix of F32, F16 or BF16", tensor.name);
  }
  constexpr int64_t kMaxDimension = std::numeric_limits<int32_t>::max();
  if (tensor.shape[0] > kMaxDimension || tensor.shape[1] > kMaxDimension) {
    return DataLossError("tensor {}: shape [{}, {}] (limit {} each)", tensor.name, tensor.shape[0],
                         tensor.shape[1], kMaxDimension);
  }
  return absl::OkStatus();
}

class Planner final {
 public:
  Planner(const Checkpoint& checkpoint, const QuantizeOptions& options)
      : checkpoint_(checkpoint), options_(options) {}

  absl::StatusOr<QuantizePlan> Run() {
    FQ_RETURN_IF_ERROR(CheckOptions(options_));
    if (checkpoint_.config.contains("quantization_config")) {
      return UnimplementedError(
          "{}: config.json: quantization_config: the model is quantized already; give the original",
          checkpoint_.path);
    }
    FQ_RETURN_IF_ERROR(PlanTables());
    FQ_RETURN_IF_ERROR(PlanOthers());
    if (linear_.empty()) {
      return DataLossError("{}: no linear layer (a matrix named ...layers.N....weight)",
                           checkpoint_.path);
    }
    plan_.group_size = options_.group_size.value_or(ChooseGroupSize());
    if (options_.imported != nullptr) FQ_RETURN_IF_ERROR(UseImportedGroupSize());
    PlanLinear();
    return std::move(plan_);
  }

 private:
  void Add(const TensorInfo& tensor, std::string name, TensorAction action) {
    PlannedTensor planned{tensor.name, std::move(name), action, 0, 0};
    if (tensor.shape.size() == 2) {
      planned.n = tensor.shape[0];
      planned.k = tensor.shape[1];
    }
    int64_t count = 1;
    for (const int64_t dim : tensor.shape) count *= dim;
    if (action != TensorAction::kCopy) plan_.total_weights += count;
    plan_.tensors.push_back(std::move(planned));
  }

  absl::Status PlanTables() {
    const TensorInfo* embedding = nullptr;
    for (const std::string_view name : kEmbeddings) {
      if (embedding == nullptr) embedding = checkpoint_.tensors->Find(name);
    }
    if (embedding == nullptr) {
      return DataLossError("{}: tensor {}: missing", checkpoint_.path, kEmbeddings[0]);
    }
    FQ_RETURN_IF_ERROR(CheckMatrix(*embedding));
    FQ_ASSIGN_OR_RETURN(const JsonObject config,
                        JsonObject::Create(checkpoint_.config, "config.json"));
    FQ_ASSIGN_OR_RETURN(const bool tied, config.GetBoolOr("tie_word_embeddings", false));
    const TensorInfo* head = checkpoint_.tensors->Find(kHead);
    if (tied && head != nullptr) {
      plan_.notes.push_back("lm_head.weight: left out, the head is tied to the embedding");
      head = nullptr;
    }
    if (head != nullptr) FQ_RETURN_IF_ERROR(CheckMatrix(*head));

    plan_.embedding = options_.embedding;
    plan_.lm_head =
        options_.lm_head.value_or(head == nullptr ? options_.embedding : TableFormat::kBFloat16);
    plan_.tied_head = head == nullptr && plan_.lm_head == plan_.embedding;
    Add(*embedding, embedding->name, ActionFor(plan_.embedding));
    if (plan_.tied_head) return absl::OkStatus();
    if (head == nullptr) {
      plan_.notes.push_back(fmt::format("lm_head: stored on its own as {}, no longer tied",
                                        TableFormatName(plan_.lm_head)));
      head = embedding;
    }
    if (plan_.lm_head == TableFormat::kInt4) {
      head_ = head;
    } else {
      Add(*head, std::string(kHead), ActionFor(plan_.lm_head));
    }
    return absl::OkStatus();
  }

  static TensorAction ActionFor(TableFormat format) {
    return format == TableFormat::kInt8 ? TensorAction::kInt8 : TensorAction::kBFloat16;
  }

  absl::Status PlanOthers() {
    for (const TensorInfo& tensor : checkpoint_.tensors->tensors()) {
      if (tensor.name == plan_.tensors.front().source || tensor.name == kHead) continue;
      if (IsLinearLayer(tensor)) {
        FQ_RETURN_IF_ERROR(CheckMatrix(tensor));
        linear_.push_back(&tensor);
      } else if (tensor.name.ends_with(".bias") && IsFloat(tensor.dtype)) {
        Add(tensor, tensor.name, TensorAction::kBFloat16);
      } else {
        Add(tensor, tensor.name, TensorAction::kCopy);
      }
    }
    return absl::OkStatus();
  }

  // The largest size that divides every K; when none does, the one that needs the least padding.
  int64_t ChooseGroupSize() const {
    std::vector<int64_t> all_k;
    for (const TensorInfo* tensor : linear_) all_k.push_back(tensor->shape[1]);
    if (head_ != nullptr) all_k.push_back(head_->shape[1]);
    for (const int64_t group : kGroupSizes) {
      if (std::all_of(all_k.begin(), all_k.end(), [&](int64_t k) { return k % group == 0; })) {
        return group;
      }
    }
    return kGroupSizes.back();
  }

  absl::Status UseImportedGroupSize() {
    FQ_ASSIGN_OR_RETURN(plan_.group_size,
                        ImportedGroupSize(options_.imported->config().group_size));
    if (options_.group_size.value_or(plan_.group_size) != plan_.group_size) {
      return InvalidArgumentError("--group-size: the codes that are taken over have {} (got {})",
                                  plan_.group_size, *options_.group_size);
    }
    return absl::OkStatus();
  }

  void PlanLinear() {
    for (const TensorInfo* tensor : linear_) {
      AddLinear(*tensor, WithoutWeightSuffix(tensor->name));
    }
    if (head_ != nullptr) AddLinear(*head_, "lm_head");
  }

  void AddLinear(const TensorInfo& tensor, const std::string& name) {
    const int64_t n = tensor.shape[0];
    const int64_t k = tensor.shape[1];
    const int64_t padded_n = PaddedN(n);
    const int64_t padded_k = PaddedK(k, plan_.group_size);
    const double ratio = static_cast<double>(padded_n) / static_cast<double>(n) *
                         (static_cast<double>(padded_k) / static_cast<double>(k));
    if (ratio > kMaxPaddingRatio) {
      plan_.notes.push_back(fmt::format("{}: kept in BF16, [{}, {}] would be padded to [{}, {}]",
                                        name, n, k, padded_n, padded_k));
      Add(tensor, name + std::string(kWeightSuffix), TensorAction::kBFloat16);
      return;
    }
    if (padded_n != n || padded_k != k) {
      plan_.notes.push_back(
          fmt::format("{}: [{}, {}] padded to [{}, {}]", name, n, k, padded_n, padded_k));
    }
    Add(tensor, name, TensorAction::kInt4);
  }

  const Checkpoint& checkpoint_;
  const QuantizeOptions& options_;
  QuantizePlan plan_;
  std::vector<const TensorInfo*> linear_;
  const TensorInfo* head_ = nullptr;  // to be an INT4 layer
};

}  // namespace

std::string_view TableFormatName(TableFormat format) {
  switch (format) {
    case TableFormat::kBFloat16:
      return "bf16";
    case TableFormat::kInt8:
      return "int8";
    case TableFormat::kInt4:
      return "int4";
  }
  return "";
}

int64_t PaddedK(int64_t k, int64_t group_size) {
  return RoundUp<int64_t>(k, group_size == -1 ? 2 : group_size);
}

int64_t PaddedN(int64_t n) { return RoundUp<int64_t>(n, kRowMultiple); }

absl::StatusOr<QuantizePlan> MakeQuantizePlan(const Checkpoint& checkpoint,
                                              const QuantizeOptions& options) {
  return Planner(checkpoint, options).Run();
}

}  // namespace flashquant
