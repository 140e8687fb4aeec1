// Glue between engine/model and the server's own types.
#include "server/serving_model.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <system_error>

#include "engine/device_collector.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"
#include "kernels/gpu_monitor.h"
#include "spdlog/spdlog.h"

namespace flashquant {
namespace {

constexpr size_t kHashedBytesPerFile = 1 << 20;

uint64_t RandomBits() {
  thread_local std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

std::string QuantizationText(const ModelConfig& config) {
  if (!config.quantization) return "none";
  const QuantizationConfig& quantization = *config.quantization;
  return fmt::format(
      "int4 {} {}, outliers {:.2f}%", quantization.symmetric ? "symmetric" : "asymmetric",
      quantization.group_size < 0 ? "per row" : fmt::format("group {}", quantization.group_size),
      quantization.stored_density * 100);
}

ChatEncoder MakeChatEncoder(const ChatFormat* chat) {
  return [chat](const v1::ChatPrompt& prompt) -> absl::StatusOr<std::vector<int32_t>> {
    std::vector<ChatMessage> messages;
    messages.reserve(static_cast<size_t>(prompt.messages_size()));
    for (const v1::ChatMessage& message : prompt.messages()) {
      messages.push_back({message.role(), message.content()});
    }
    return chat->BuildPrompt(messages);
  };
}

MapperOptions MakeMapperOptions(const ServerConfig& config, const ServedModel& model) {
  MapperOptions options;
  options.limits.model_name = ModelName(config);
  options.limits.vocab_size = model.config.vocab_size;
  options.limits.context_length = model.engine.context_length;
  options.limits.has_tokenizer = model.tokenizer != nullptr;
  options.limits.has_chat_format = model.chat_format.has_value();
  if (!model.chat_refusal.empty()) options.limits.chat_refusal = model.chat_refusal;
  options.tokenizer = model.tokenizer.get();
  if (model.chat_format) options.encode_chat = MakeChatEncoder(&*model.chat_format);
  options.eos_token_ids = model.defaults.eos_token_ids;
  options.defaults = model.defaults.sampling;
  options.max_request_duration = DurationFromSeconds(config.max_request_seconds);
  options.default_queue_timeout = DurationFromSeconds(config.queue_timeout_seconds);
  options.random = RandomBits;
  return options;
}

v1::GetModelResponse MakeInfo(const ServedModel& model, const MapperOptions& options) {
  v1::GetModelResponse info;
  info.set_model(options.limits.model_name);
  info.set_revision(options.revision);
  info.set_architecture(model.config.architecture);
  info.set_quantization(QuantizationText(model.config));
  info.set_backend(model.backend->info().name);
  info.set_vocabulary_size(static_cast<uint32_t>(model.config.vocab_size));
  if (model.tokenizer != nullptr && model.tokenizer->prompt_bos()) {
    info.set_prompt_bos_token_id(static_cast<uint32_t>(*model.tokenizer->prompt_bos()));
  }
  info.mutable_eos_token_ids()->Add(options.eos_token_ids.begin(), options.eos_token_ids.end());
  info.set_has_tokenizer(options.limits.has_tokenizer);
  info.set_has_chat_format(options.limits.has_chat_format);
  v1::ModelLimits* limits = info.mutable_limits();
  limits->set_context_tokens(static_cast<uint32_t>(options.limits.context_length));
  limits->set_prompt_bytes(RequestLimits::kMaxPromptBytes);
  limits->set_stop_sequences(RequestLimits::kMaxStopSequences);
  limits->set_stop_sequence_bytes(RequestLimits::kMaxStopSequenceBytes);
  limits->set_stop_token_ids(RequestLimits::kMaxStopTokenIds);
  limits->set_logit_biases(RequestLimits::kMaxLogitBiases);
  limits->set_top_logprobs(RequestLimits::kMaxTopLogprobs);
  limits->set_tokens_per_message(RequestLimits::kMaxTokensPerMessage);
  *limits->mutable_request_duration() = ToProtoDuration(options.max_request_duration);
  v1::SamplingParams* defaults = info.mutable_sampling_defaults();
  defaults->set_temperature(options.defaults.temperature);
  defaults->set_top_p(options.defaults.top_p);
  defaults->set_top_k(static_cast<uint32_t>(options.defaults.top_k));
  defaults->set_min_p(options.defaults.min_p);
  defaults->set_repetition_penalty(options.defaults.repetition_penalty);
  defaults->set_presence_penalty(options.defaults.presence_penalty);
  defaults->set_frequency_penalty(options.defaults.frequency_penalty);
  return info;
}

}  // namespace

std::string ModelName(const ServerConfig& config) {
  if (!config.model_name.empty()) return config.model_name;
  const std::filesystem::path path =
      (std::filesystem::absolute(config.model_path) / "").lexically_normal().parent_path();
  const std::string name = path.filename().string();
  return name.empty() ? "model" : name;
}

absl::StatusOr<std::string> ModelRevision(const std::string& path) {
  std::vector<std::filesystem::path> files = {std::filesystem::path(path) / "config.json"};
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  if (error) return NotFoundError("{}: cannot list the folder", path);
  std::sort(files.begin(), files.end());
  uint32_t crc = 0;
  std::vector<char> bytes(kHashedBytesPerFile);
  for (const std::filesystem::path& file : files) {
    std::ifstream stream(file, std::ios::binary);
    stream.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    const auto num_bytes = static_cast<size_t>(std::max<std::streamsize>(stream.gcount(), 0));
    crc = Crc32c(bytes.data(), num_bytes, crc);
  }
  return fmt::format("{:08x}", crc);
}

absl::StatusOr<std::unique_ptr<const ServingModel>> MakeServingModel(const ServerConfig& config,
                                                                     const ServedModel& model,
                                                                     Engine* engine) {
  MapperOptions options = MakeMapperOptions(config, model);
  FQ_ASSIGN_OR_RETURN(options.revision, ModelRevision(model.path));
  v1::GetModelResponse info = MakeInfo(model, options);
  auto serving = std::make_unique<ServingModel>(std::move(options), engine);
  serving->info = std::move(info);
  return std::unique_ptr<const ServingModel>(std::move(serving));
}

void DescribeModel(const ServedModel& model, const std::string& revision, Metrics* metrics) {
  const std::optional<QuantizationConfig>& quantization = model.config.quantization;
  metrics->SetModelInfo(quantization ? "int4" : "none",
                        quantization ? fmt::format("{}", quantization->group_size) : "0",
                        fmt::format("{:.4f}", quantization ? quantization->stored_density : 0.0),
                        revision);
  const LoadSeconds& load = model.model->weights().load_seconds;
  metrics->SetModelLoadDuration(LoadStage::kRead, load.read);
  metrics->SetModelLoadDuration(LoadStage::kVerify, load.verify);
  metrics->SetModelLoadDuration(LoadStage::kPack, load.pack);
  metrics->SetModelLoadDuration(LoadStage::kUpload, load.upload);
  metrics->SetModelLoadDuration(LoadStage::kWarmUp, model.warm_up_seconds);
  metrics->SetModelWeightBytes(WeightKind::kPacked, model.weight_bytes.codes);
  metrics->SetModelWeightBytes(WeightKind::kScales, model.weight_bytes.scales);
  metrics->SetModelWeightBytes(WeightKind::kOutliers, model.weight_bytes.outliers);
  metrics->SetModelWeightBytes(WeightKind::kDense, model.weight_bytes.dense);
  metrics->SetKvBytes(model.kv_cache_bytes);
  metrics->SetModelContextLimit(model.engine.context_length);
  metrics->SetModelReady(true);
}

void LogGpuMemory(const ServedModel& model) {
  if (model.plan.without_pool() == 0) return;
  const auto mib = [](int64_t num_bytes) { return static_cast<double>(num_bytes) * 0x1p-20; };
  const double planned = mib(model.plan.without_pool());
  const double taken = mib(model.taken_gpu_bytes - model.kv_cache_bytes);
  spdlog::info(
      "GPU memory: planned {:.0f} MiB (weights {:.0f}, buffers {:.0f}) and a KV pool of {:.0f}; "
      "taken {:.0f} MiB besides the pool, {:+.1f}%; self-check of the layers {:.2f} s",
      planned, mib(model.plan.weights()), planned - mib(model.plan.weights()),
      mib(model.kv_cache_bytes), taken, 100 * (taken - planned) / planned,
      model.self_check_seconds);
}

void WatchGpu(const ServedModel& model, MetricsEndpoint* endpoint) {
  const std::string bus_id = model.backend->info().pci_bus_id;
  if (bus_id.empty()) return;
  auto monitor = GpuMonitor::Open(bus_id);
  if (!monitor.ok()) {
    spdlog::warn("no metrics of the GPU: {}", std::string(monitor.status().message()));
    return;
  }
  const int64_t besides_pool = model.taken_gpu_bytes - model.kv_cache_bytes;
  endpoint->Add(std::make_shared<DeviceCollector>(
      *std::move(monitor), DeviceMemory{.weights = model.plan.weights(),
                                        .kv = model.kv_cache_bytes,
                                        .workspace = besides_pool - model.plan.weights()}));
}

}  // namespace flashquant
