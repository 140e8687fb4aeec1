// See memory_plan.h.
#include "engine/model/memory_plan.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <vector>

#include "engine/checkpoint/quantized_tensors.h"
#include "engine/model/kv_cache.h"
#include "engine/model/model_layout.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/token_values.h"
#include "kernels/planned_memory.h"

namespace flashquant {
namespace {

constexpr int32_t kGpuRowMultiple = 8;
constexpr int64_t kActivationBytes = 2;  // BF16

double GiB(int64_t num_bytes) { return static_cast<double>(num_bytes) * 0x1p-30; }

// One linear layer's parts as the checkpoint has them.
std::vector<PlannedPart> PlannedParts(const Checkpoint& checkpoint, const ModelConfig& config,
                                      const LinearShape& shape) {
  std::vector<PlannedPart> parts;
  for (const LinearPartShape& part : shape.parts) {
    PlannedPart planned = {.n = part.n, .k = shape.k, .has_bias = part.has_bias};
    if (config.quantization.has_value() && IsQuantizedLinear(*checkpoint.tensors, part.name)) {
      planned.int4 = true;
      planned.group_size =
          config.quantization->group_size == -1 ? shape.k : config.quantization->group_size;
      planned.symmetric = config.quantization->symmetric;
      const TensorInfo* records =
          checkpoint.tensors->Find(fmt::format("{}{}", part.name, kRecordsSuffix));
      if (records != nullptr) planned.outlier_records = records->num_rows();
    }
    parts.push_back(planned);
  }
  return parts;
}

struct Sums {
  int64_t bytes = 0;
  int64_t outliers = 0;  // of bytes
  int64_t largest_int4 = 0;
};

void AddLinear(const Checkpoint& checkpoint, const ModelConfig& config, const LinearShape& shape,
               Sums* sums) {
  std::vector<PlannedPart> parts = PlannedParts(checkpoint, config, shape);
  const int64_t with = PlannedWeightBytes(parts);
  const bool int4 = parts[0].int4;
  for (PlannedPart& part : parts) part.outlier_records = 0;
  sums->bytes += with;
  sums->outliers += with - PlannedWeightBytes(parts);
  if (int4) sums->largest_int4 = std::max(sums->largest_int4, shape.n() * shape.k);
}

int64_t ActivationBytes(const ModelConfig& config, int32_t context_length,
                        const MemoryPlanOptions& options) {
  const int64_t sequences = RoundUp(options.max_sequences, kGpuRowMultiple);
  const int64_t rows = std::max<int64_t>(RoundUp(options.token_budget, kGpuRowMultiple), sequences);
  const int64_t row = 2 * config.hidden_size + config.qkv_size() +
                      int64_t{config.num_heads} * config.head_dim + 3 * config.intermediate_size;
  // Logits, and room to draw rows with logprobs in.
  const int64_t logits = config.hidden_size * kActivationBytes + int64_t{config.vocab_size} * 4 * 2;
  const int64_t token_counts =
      std::min(config.vocab_size, context_length) * static_cast<int64_t>(sizeof(TokenCount));
  return rows * row * kActivationBytes + sequences * (logits + token_counts);
}

}  // namespace

absl::StatusOr<MemoryPlan> MakeMemoryPlan(const Checkpoint& checkpoint,
                                          const MemoryPlanOptions& options) {
  FQ_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(checkpoint));
  MemoryPlan plan;
  plan.context_length = options.context_length == 0 ? config.max_position : options.context_length;
  if (plan.context_length > config.max_position) {
    return FailedPreconditionError("--max-length {}: above the model's context ({})",
                                   plan.context_length, config.max_position);
  }
  Sums layers;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    for (const LinearShape& shape : LayerLinears(config, layer)) {
      if (!shape.parts.empty()) AddLinear(checkpoint, config, shape, &layers);
    }
  }
  plan.layers = layers.bytes - layers.outliers;
  Sums tables;
  AddLinear(checkpoint, config, EmbeddingShape(config), &tables);
  int64_t head_columns = 0;
  if (HasOwnHead(*checkpoint.tensors, config)) {
    AddLinear(checkpoint, config, HeadShape(config), &tables);
    if (IsQuantizedLinear(*checkpoint.tensors, kHeadName)) head_columns = config.vocab_size;
  }
  plan.outliers = layers.outliers + tables.outliers;
  plan.tables = tables.bytes - tables.outliers;
  plan.small = (2 * int64_t{config.num_layers} + 1) * config.hidden_size * 4 +
               int64_t{plan.context_length} * config.head_dim * 4;
  plan.activations = ActivationBytes(config, plan.context_length, options);
  plan.scratch = PlannedScratchBytes(layers.largest_int4, head_columns, options.max_sequences);
  plan.recordings =
      PlannedRecordingBytes(config.num_layers, options.max_sequences, kGpuRowMultiple);
  const PagedKvGeometry geometry = {.num_layers = config.num_layers,
                                    .block_tokens = options.block_tokens,
                                    .num_kv_heads = config.num_kv_heads,
                                    .head_dim = config.head_dim};
  const int64_t block = KvCache::BlockBytes(geometry, options.kv_dtype);
  plan.token = block / options.block_tokens;
  plan.context = CeilDiv(plan.context_length, options.block_tokens) * block;
  plan.pool = options.max_sequences * plan.context + block;
  return plan;
}

absl::StatusOr<int64_t> ParseMemorySize(const std::string& text) {
  struct Unit {
    std::string_view name;
    double factor;
  };
  constexpr std::array<Unit, 6> kUnits = {
      {{"", 1.0}, {"B", 1.0}, {"GiB", 0x1p30}, {"MiB", 0x1p20}, {"GB", 1e9}, {"MB", 1e6}}};
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  const std::string_view name(rest, static_cast<size_t>(end - rest));
  for (const Unit& unit : kUnits) {
    if (error != std::errc() || name != unit.name) continue;
    const double num_bytes = number * unit.factor;
    if (num_bytes >= 1.0 && num_bytes <= 1e15) return static_cast<int64_t>(num_bytes);
  }
  return InvalidArgumentError("'{}' is no size; as in 24GiB, 80GB or 512MiB", text);
}

std::string DescribeMemoryPlan(const MemoryPlan& plan, const MemoryPlanOptions& options,
                               int64_t gpu_memory_bytes, int64_t reserved_bytes) {
  std::string out;
  const auto line = [&](std::string_view name, int64_t num_bytes) {
    out += fmt::format("{:<34} {:>9.3f} GiB\n", name, GiB(num_bytes));
  };
  line("linear layers", plan.layers);
  line("outliers", plan.outliers);
  line("embedding and head", plan.tables);
  line("norms, positions", plan.small);
  line("activations", plan.activations);
  line("workspaces", plan.scratch);
  line("recorded steps", plan.recordings);
  line("all but keys and values", plan.without_pool());
  line(fmt::format("KV, {} x {} tokens{}", options.max_sequences, plan.context_length,
                   options.kv_dtype == DType::kF8E4M3 ? " in FP8" : ""),
       plan.pool);
  line("total", plan.without_pool() + plan.pool);
  if (gpu_memory_bytes == 0) return out;
  const int64_t left = gpu_memory_bytes - reserved_bytes - plan.without_pool();
  out += fmt::format("card of {:.2f} GiB, {:.2f} GiB of it reserved: ", GiB(gpu_memory_bytes),
                     GiB(reserved_bytes));
  if (left < plan.context) {
    return out + fmt::format(
                     "does not fit ({:.2f} GiB missing for one context of {} tokens); use "
                     "fewer bits, --lm-head int4 or a shorter --max-length\n",
                     GiB(plan.context - left), plan.context_length);
  }
  const int64_t contexts = left / plan.context;
  if (left >= plan.pool)
    return out + fmt::format("fits, {:.2f} GiB to spare\n", GiB(left - plan.pool));
  return out + fmt::format(
                   "fits with a smaller KV pool: {} tokens in all, {} sequences of {} or {} "
                   "of {}\n",
                   left / plan.token, contexts, plan.context_length, options.max_sequences,
                   left / plan.token / options.max_sequences);
}

}  // namespace flashquant
