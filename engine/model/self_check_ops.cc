// The ops without weights of their own kind: run on the backend and, with the same inputs, on the
// CPU backend, whose own tests compare it with an oracle in double precision.
#include <algorithm>
#include <numeric>
#include <string>

#include "engine/model/rope_table.h"
#include "engine/model/self_check.h"
#include "engine/model/self_check_support.h"
#include "kernels/backend_factory.h"
#include "kernels/base/math_util.h"

namespace flashquant {
namespace {

constexpr int32_t kRows = 8;
constexpr int32_t kPromptTokens = 37;  // two whole blocks and a part
constexpr int32_t kBlockTokens = 16;
constexpr uint32_t kSeed = 77;

using Values = absl::StatusOr<std::vector<float>>;

size_t Count(int64_t rows, int64_t columns) { return static_cast<size_t>(rows * columns); }

absl::StatusOr<DeviceBuffer> AllocateActivations(size_t count, Backend* backend) {
  return backend->Allocate(static_cast<int64_t>(count) *
                           DTypeBytes(backend->info().activation_dtype));
}

Values DownloadActivations(const DeviceBuffer& buffer, size_t count, Backend* backend) {
  return Download(buffer, count, backend->info().activation_dtype, backend);
}

Values RunNorm(const ModelConfig& config, Backend* backend) {
  const size_t count = Count(kRows, config.hidden_size);
  const auto hidden = static_cast<size_t>(config.hidden_size);
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer x,
                      UploadActivations(SelfCheckValues(count, kSeed), backend));
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer residual,
                      UploadActivations(SelfCheckValues(count, kSeed + 1), backend));
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer weight,
                      UploadAll(SelfCheckValues(hidden, kSeed + 2), backend));
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer bias,
                      UploadAll(SelfCheckValues(hidden, kSeed + 3), backend));
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer out, AllocateActivations(count, backend));
  if (config.family == DecoderFamily::kOpt) {
    FQ_RETURN_IF_ERROR(backend->LayerNorm({.num_rows = kRows,
                                           .hidden = config.hidden_size,
                                           .epsilon = config.norm_epsilon,
                                           .x = x.data(),
                                           .residual = residual.data(),
                                           .weight = weight.data(),
                                           .bias = bias.data(),
                                           .out = out.data()}));
  } else {
    FQ_RETURN_IF_ERROR(backend->RmsNorm({.num_rows = kRows,
                                         .hidden = config.hidden_size,
                                         .epsilon = config.norm_epsilon,
                                         .x = x.data(),
                                         .residual = residual.data(),
                                         .weight = weight.data(),
                                         .out = out.data()}));
  }
  return DownloadActivations(out, count, backend);
}

Values RunActivation(const ModelConfig& config, Backend* backend) {
  const size_t count = Count(kRows, config.intermediate_size);
  const bool relu = config.family == DecoderFamily::kOpt;
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer x,
                      UploadActivations(SelfCheckValues(relu ? count : 2 * count, kSeed), backend));
  if (relu) {
    FQ_RETURN_IF_ERROR(backend->Relu({.count = static_cast<int64_t>(count), .x = x.data()}));
    return DownloadActivations(x, count, backend);
  }
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer out, AllocateActivations(count, backend));
  FQ_RETURN_IF_ERROR(backend->SiluAndMul({.num_rows = kRows,
                                          .intermediate = config.intermediate_size,
                                          .gate_up = x.data(),
                                          .out = out.data()}));
  return DownloadActivations(out, count, backend);
}

// One sequence and its KV cache of one layer: a prompt, then one token behind it.
class AttentionRun {
 public:
  AttentionRun(const ModelConfig& config, Backend* backend)
      : config_(config),
        backend_(backend),
        kv_{.num_layers = 1,
            .num_blocks = CeilDiv(kPromptTokens + 1, kBlockTokens) + 1,
            .block_tokens = kBlockTokens,
            .num_kv_heads = config.num_kv_heads,
            .head_dim = config.head_dim} {}

  // The outputs of prompt and token, one behind the other.
  Values Run() {
    const int64_t cache_bytes =
        kv_.num_blocks * kv_.BlockElements() * DTypeBytes(backend_->info().kv_dtype);
    FQ_ASSIGN_OR_RETURN(k_cache_, backend_->Allocate(cache_bytes));
    FQ_ASSIGN_OR_RETURN(v_cache_, backend_->Allocate(cache_bytes));
    FQ_ASSIGN_OR_RETURN(cos_sin_, UploadAll(MakeRopeTable(config_, kPromptTokens + 1), backend_));
    std::vector<int32_t> blocks(static_cast<size_t>(kv_.num_blocks - 1));
    std::iota(blocks.begin(), blocks.end(), 1);
    FQ_ASSIGN_OR_RETURN(block_ids_, UploadAll(blocks, backend_));
    FQ_ASSIGN_OR_RETURN(std::vector<float> out, Step(0, kPromptTokens));
    FQ_ASSIGN_OR_RETURN(const std::vector<float> decode, Step(kPromptTokens, 1));
    out.insert(out.end(), decode.begin(), decode.end());
    return out;
  }

 private:
  Values Step(int32_t first, int32_t num_tokens) {
    std::vector<int32_t> positions(static_cast<size_t>(num_tokens));
    std::iota(positions.begin(), positions.end(), first);
    // Blocks 1, 2, ... in order: token t has slot block_tokens + t.
    std::vector<int64_t> slots(positions.begin(), positions.end());
    for (int64_t& slot : slots) slot += kBlockTokens;
    const std::vector<int32_t> query = {0, num_tokens};
    const std::vector<int32_t> contexts = {first + num_tokens};
    const std::vector<int32_t> blocks = {0, CeilDiv(first + num_tokens, kBlockTokens)};
    const AttentionBatch host = {.num_sequences = 1,
                                 .num_tokens = num_tokens,
                                 .query_indptr = query.data(),
                                 .context_lengths = contexts.data(),
                                 .block_indptr = blocks.data()};
    FQ_ASSIGN_OR_RETURN(const DeviceBuffer device_query, UploadAll(query, backend_));
    FQ_ASSIGN_OR_RETURN(const DeviceBuffer device_contexts, UploadAll(contexts, backend_));
    FQ_ASSIGN_OR_RETURN(const DeviceBuffer device_blocks, UploadAll(blocks, backend_));
    FQ_ASSIGN_OR_RETURN(const DeviceBuffer device_positions, UploadAll(positions, backend_));
    FQ_ASSIGN_OR_RETURN(const DeviceBuffer device_slots, UploadAll(slots, backend_));
    const std::vector<float> values = SelfCheckValues(Count(num_tokens, config_.qkv_size()),
                                                      kSeed + static_cast<uint32_t>(first));
    FQ_ASSIGN_OR_RETURN(const DeviceBuffer qkv, UploadActivations(values, backend_));
    const size_t count = Count(num_tokens, int64_t{config_.num_heads} * config_.head_dim);
    FQ_ASSIGN_OR_RETURN(const DeviceBuffer out, AllocateActivations(count, backend_));
    const AttentionBatch batch = {.num_sequences = 1,
                                  .num_tokens = num_tokens,
                                  .query_indptr = device_query.As<int32_t>(),
                                  .context_lengths = device_contexts.As<int32_t>(),
                                  .block_indptr = device_blocks.As<int32_t>(),
                                  .block_ids = block_ids_.As<int32_t>()};
    FQ_RETURN_IF_ERROR(backend_->PlanAttention(host));
    FQ_RETURN_IF_ERROR(backend_->RopeAndAttention({.num_tokens = num_tokens,
                                                   .num_heads = config_.num_heads,
                                                   .num_kv_heads = config_.num_kv_heads,
                                                   .head_dim = config_.head_dim,
                                                   .qkv = qkv.data(),
                                                   .positions = device_positions.As<int32_t>(),
                                                   .slots = device_slots.As<int64_t>(),
                                                   .cos_sin = cos_sin_.As<float>(),
                                                   .kv = kv_,
                                                   .k_cache = k_cache_.data(),
                                                   .v_cache = v_cache_.data()},
                                                  Attention(batch, qkv, out)));
    return DownloadActivations(out, count, backend_);
  }

  PagedAttentionParams Attention(const AttentionBatch& batch, const DeviceBuffer& qkv,
                                 const DeviceBuffer& out) const {
    return {.batch = batch,
            .num_heads = config_.num_heads,
            .num_kv_heads = config_.num_kv_heads,
            .head_dim = config_.head_dim,
            .softmax_scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim)),
            .sliding_window = config_.sliding_window(0),
            .qkv = qkv.data(),
            .kv = kv_,
            .k_cache = k_cache_.data(),
            .v_cache = v_cache_.data(),
            .out = out.data()};
  }

  const ModelConfig& config_;
  Backend* const backend_;
  const PagedKvGeometry kv_;
  DeviceBuffer k_cache_, v_cache_, cos_sin_, block_ids_;
};

// The ids that greedy rows draw, as numbers.
Values RunSampling(const ModelConfig& config, Backend* backend) {
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer logits,
                      UploadAll(SelfCheckValues(Count(kRows, config.vocab_size), kSeed), backend));
  FQ_ASSIGN_OR_RETURN(
      const DeviceBuffer rows,
      UploadAll(std::vector<SampleRow>(kRows, SampleRow{.temperature = 0.0f}), backend));
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer ids, backend->Allocate(kRows * int64_t{sizeof(int32_t)}));
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer non_finite, backend->Allocate(kRows));
  FQ_RETURN_IF_ERROR(backend->SampleTokens({.num_rows = kRows,
                                            .vocab_size = config.vocab_size,
                                            .logits = logits.As<float>(),
                                            .rows = rows.As<SampleRow>(),
                                            .token_ids = ids.As<int32_t>(),
                                            .non_finite = non_finite.As<uint8_t>()}));
  std::vector<int32_t> drawn(kRows);
  FQ_RETURN_IF_ERROR(backend->CopyToHost(drawn.data(), ids.data(), ids.num_bytes()));
  FQ_RETURN_IF_ERROR(backend->Synchronize());
  return std::vector<float>(drawn.begin(), drawn.end());
}

}  // namespace

absl::Status CheckOps(const ModelConfig& config, Backend* backend) {
  FQ_ASSIGN_OR_RETURN(
      const std::unique_ptr<Backend> host,
      CreateBackend({.kind = "cpu", .kv_cache_dtype = KvCacheDTypeName(backend->info().kv_dtype)}));
  const auto compare = [&](const char* what, const auto& run) -> absl::Status {
    FQ_ASSIGN_OR_RETURN(const std::vector<float> expected, run(host.get()));
    absl::StatusOr<std::vector<float>> actual = run(backend);
    if (!actual.ok()) return Annotate(actual.status(), fmt::format("self-check: {}", what));
    return CompareWithHost(what, *actual, std::vector<double>(expected.begin(), expected.end()),
                           *backend);
  };
  FQ_RETURN_IF_ERROR(compare("norm", [&](Backend* on) { return RunNorm(config, on); }));
  FQ_RETURN_IF_ERROR(
      compare("attention", [&](Backend* on) { return AttentionRun(config, on).Run(); }));
  FQ_RETURN_IF_ERROR(compare("activation", [&](Backend* on) { return RunActivation(config, on); }));
  return compare("sampling", [&](Backend* on) { return RunSampling(config, on); });
}

}  // namespace flashquant
