// flashquant inspect: what is in a checkpoint folder or a stand-alone Tile-COO file, and whether it
// is sound.
//
// Without --verify a folder's headers, shapes and outlier index are read; with it every byte is,
// and every checksum and rule of the format is checked. A .tcoo file is always checked whole.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "engine/model/memory_plan.h"
#include "engine/quantize/random_checkpoint.h"
#include "engine/tools/commands.h"
#include "engine/tools/run_tool.h"
#include "kernels/backend_factory.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo_file.h"
#include "kernels/format/tile_coo_statistics.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxTileCooFileBytes = int64_t{16} << 30;

struct LayerSummary {
  std::string name;
  int64_t n = 0;
  int64_t k = 0;
  int64_t num_bytes = 0;
  int64_t num_records = 0;
  int64_t num_tiles = 0;
  int64_t max_tile_records = 0;
  int64_t max_bucket_records = 0;
};

double MegaBytes(int64_t num_bytes) { return static_cast<double>(num_bytes) / 1e6; }

double Density(int64_t num_records, int64_t num_weights) {
  if (num_weights == 0) return 0;
  return 100.0 * static_cast<double>(kSlotsPerRecord * num_records) /
         static_cast<double>(num_weights);
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

class FolderInspector final {
 public:
  FolderInspector(const Checkpoint& checkpoint, std::optional<QuantizationConfig> config)
      : tensors_(*checkpoint.tensors), config_(std::move(config)) {}

  absl::Status Print() {
    for (const TensorInfo& tensor : tensors_.tensors()) {
      if (tensor.name.ends_with(kCodesSuffix)) FQ_RETURN_IF_ERROR(AddLayer(tensor));
    }
    if (config_.has_value()) {
      fmt::print("quantization  {}, group size {}, {}, tiles {} x {}, {} buckets\n",
                 config_->method, config_->group_size,
                 config_->symmetric ? "symmetric" : "asymmetric", config_->geometry.tile_k,
                 config_->geometry.tile_n, config_->geometry.buckets_per_tile);
    } else {
      fmt::print("quantization  none\n");
    }
    if (!layers_.empty()) PrintLayers();
    PrintOthers();
    return absl::OkStatus();
  }

  // Problems found, each printed.
  int Verify() {
    int num_problems = 0;
    int num_checked = 0;
    int num_without = 0;
    const auto report = [&](const absl::Status& status) {
      if (status.ok()) return;
      ++num_problems;
      fmt::print(stderr, "{}\n", std::string(status.message()));
    };
    for (const TensorInfo& tensor : tensors_.tensors()) {
      ++(tensors_.StoredChecksum(tensor).has_value() ? num_checked : num_without);
      report(tensors_.VerifyChecksum(tensor));
    }
    for (const LayerSummary& layer : layers_) {
      report(ReadQuantizedLinear(tensors_, *config_, layer.name, layer.n, layer.k).status());
    }
    fmt::print(
        "verify        {} checksums compared, {} tensors without one, {} layers checked, {}\n",
        num_checked, num_without, layers_.size(),
        num_problems == 0 ? "no problem" : fmt::format("{} problems", num_problems));
    return num_problems;
  }

 private:
  absl::Status AddLayer(const TensorInfo& codes) {
    if (!config_.has_value()) {
      return DataLossError("tensor {}: config.json has no quantization_config", codes.name);
    }
    if (codes.shape.size() != 2) {
      return DataLossError("tensor {}: shape {} (needs 2 dimensions)", codes.name,
                           ShapeText(codes.shape));
    }
    LayerSummary layer;
    layer.name = codes.name.substr(0, codes.name.size() - kCodesSuffix.size());
    layer.n = codes.shape[0];
    layer.k = 2 * codes.shape[1];
    const auto& shapes = config_->true_shapes;
    if (const auto it = shapes.find(layer.name); it != shapes.end() && it->is_array() &&
                                                 it->size() == 2 && (*it)[0].is_number_integer() &&
                                                 (*it)[1].is_number_integer()) {
      layer.n = (*it)[0].get<int64_t>();
      layer.k = (*it)[1].get<int64_t>();
    }
    for (const std::string_view suffix : {kCodesSuffix, kScalesSuffix, kZerosSuffix,
                                          kTileIndptrSuffix, kBucketInfoSuffix, kRecordsSuffix}) {
      const std::string name = layer.name + std::string(suffix);
      if (const TensorInfo* tensor = tensors_.Find(name)) {
        layer.num_bytes += tensor->num_bytes;
        layer_tensors_.insert(name);
      }
    }
    FQ_RETURN_IF_ERROR(AddOutlierIndex(&layer));
    layers_.push_back(std::move(layer));
    return absl::OkStatus();
  }

  // Not validated here: only sums and maxima of what is stored.
  absl::Status AddOutlierIndex(LayerSummary* layer) const {
    const std::string indptr_name = layer->name + std::string(kTileIndptrSuffix);
    if (tensors_.Find(indptr_name) == nullptr) return absl::OkStatus();
    FQ_ASSIGN_OR_RETURN(const std::vector<uint8_t> indptr_bytes, tensors_.ReadBytes(indptr_name));
    FQ_ASSIGN_OR_RETURN(const std::vector<uint8_t> bucket_bytes,
                        tensors_.ReadBytes(layer->name + std::string(kBucketInfoSuffix)));
    std::vector<uint32_t> indptr(indptr_bytes.size() / sizeof(uint32_t));
    std::memcpy(indptr.data(), indptr_bytes.data(), indptr.size() * sizeof(uint32_t));
    std::vector<TileCooBucket> buckets(bucket_bytes.size() / sizeof(TileCooBucket));
    std::memcpy(buckets.data(), bucket_bytes.data(), buckets.size() * sizeof(TileCooBucket));
    for (size_t i = 1; i < indptr.size(); ++i) {
      layer->max_tile_records =
          std::max(layer->max_tile_records, int64_t{indptr[i]} - int64_t{indptr[i - 1]});
    }
    for (const TileCooBucket& bucket : buckets) {
      layer->max_bucket_records = std::max<int64_t>(layer->max_bucket_records, bucket.count);
    }
    layer->num_tiles = static_cast<int64_t>(indptr.size()) - 1;
    layer->num_records = indptr.empty() ? 0 : int64_t{indptr.back()};
    return absl::OkStatus();
  }

  void PrintLayers() const {
    size_t width = 5;
    for (const LayerSummary& layer : layers_) width = std::max(width, layer.name.size());
    fmt::print("\n{:<{}}  {:>15}  {:>11}  {:>8}  {:>9}  {:>8}  {:>10}\n", "layer", width, "N x K",
               "bytes", "density", "fill/tile", "max/tile", "max/bucket");
    int64_t num_weights = 0;
    int64_t num_bytes = 0;
    int64_t num_records = 0;
    for (const LayerSummary& layer : layers_) {
      const double fill = layer.num_tiles == 0 ? 0
                                               : static_cast<double>(layer.num_records) /
                                                     static_cast<double>(layer.num_tiles);
      fmt::print("{:<{}}  {:>15}  {:>11}  {:>7.3f}%  {:>9.1f}  {:>8}  {:>10}\n", layer.name, width,
                 fmt::format("{} x {}", layer.n, layer.k), layer.num_bytes,
                 Density(layer.num_records, layer.n * layer.k), fill, layer.max_tile_records,
                 layer.max_bucket_records);
      num_weights += layer.n * layer.k;
      num_bytes += layer.num_bytes;
      num_records += layer.num_records;
    }
    fmt::print("{:<{}}  {:>15}  {:>11}  {:>7.3f}%\n", "total", width, num_weights, num_bytes,
               Density(num_records, num_weights));
    fmt::print("fill and maxima in records of 4 slots; {:.3f} bits a weight\n",
               8.0 * static_cast<double>(num_bytes) / static_cast<double>(num_weights));
  }

  void PrintOthers() const {
    fmt::print("\n{:<56}  {:<5}  {:<16}  {:>11}\n", "other tensors", "dtype", "shape", "bytes");
    int64_t total = 0;
    int64_t listed = 0;
    for (const TensorInfo& tensor : tensors_.tensors()) {
      total += tensor.num_bytes;
      if (layer_tensors_.contains(tensor.name)) continue;
      listed += tensor.num_bytes;
      fmt::print("{:<56}  {:<5}  {:<16}  {:>11}\n", tensor.name,
                 std::string(DTypeName(tensor.dtype)), ShapeText(tensor.shape), tensor.num_bytes);
    }
    fmt::print("{:<56}  {:<5}  {:<16}  {:>11}\n\n", "total", "", "", listed);
    fmt::print("tensors       {}\nbytes         {} ({:.2f} MB)\n", tensors_.tensors().size(), total,
               MegaBytes(total));
  }

  const TensorSource& tensors_;
  const std::optional<QuantizationConfig> config_;
  std::vector<LayerSummary> layers_;
  std::set<std::string> layer_tensors_;
};

absl::Status InspectFolder(const std::string& path, bool verify) {
  FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(path));
  FQ_ASSIGN_OR_RETURN(std::optional<QuantizationConfig> config,
                      ParseQuantizationConfig(checkpoint.config));
  FolderInspector inspector(checkpoint, std::move(config));
  FQ_RETURN_IF_ERROR(inspector.Print());
  if (verify) {
    const int num_problems = inspector.Verify();
    if (num_problems > 0) return DataLossError("{}: {} problems found", path, num_problems);
  }
  return absl::OkStatus();
}

absl::Status InspectTileCooFile(const std::string& path) {
  FQ_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path, kMaxTileCooFileBytes));
  const absl::StatusOr<TileCooFile> file =
      ParseTileCooFile(std::span(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
  if (!file.ok()) return Annotate(file.status(), path);
  const TileCooGeometry& geometry = file->matrix.geometry();
  const TileCooStatistics statistics = ComputeTileCooStatistics(file->matrix);
  fmt::print("Tile-COO      1.{}, K {}, N {}\n", file->header.version_minor, geometry.k,
             geometry.n);
  fmt::print("tiles         {} of {} x {}, {} empty, {} buckets each\n", statistics.num_tiles,
             geometry.tile_k, geometry.tile_n, statistics.num_empty_tiles,
             geometry.buckets_per_tile);
  fmt::print(
      "values        {}, {}, {}, order hint {}\n",
      geometry.value_type == TileCooValueType::kBFloat16 ? "BF16" : "FP16",
      geometry.column_mode == TileCooColumnMode::kShared ? "shared column" : "column per slot",
      geometry.semantics == TileCooSemantics::kReplace ? "replace" : "residual",
      file->header.stored_order_hint);
  fmt::print("slots         {} stored ({:.3f}%), {} null\n", file->matrix.num_slots(),
             100 * file->matrix.stored_density(), statistics.num_null_slots);
  fmt::print(
      "records       {:.1f} a tile, at most {} in a tile and {} in a bucket, balance {:.3f}\n",
      statistics.mean_tile_records(), statistics.max_tile_records, statistics.max_bucket_records,
      statistics.bucket_balance);
  fmt::print("bytes         {} in the file, {} by the paper's formula\n", bytes.size(),
             PaperStorageBytes(file->matrix));
  fmt::print("verify        header, checksums and every rule hold\n");
  return absl::OkStatus();
}

struct PlanFlags {
  std::string gpu_memory;
  std::string reserve = "1GiB";
  std::string kv_cache_dtype = "auto";
  MemoryPlanOptions options;
};

void AddPlanFlags(CLI::App* command, CLI::Option* plan, PlanFlags* flags) {
  command->add_option("--gpu-memory", flags->gpu_memory, "of the card, as in 24GiB")->needs(plan);
  command->add_option("--gpu-reserve", flags->reserve, "of it for driver, desktop and others")
      ->needs(plan)
      ->capture_default_str();
  command->add_option("--max-sequences", flags->options.max_sequences, "sequences at once")
      ->needs(plan)
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command
      ->add_option("--max-length", flags->options.context_length,
                   "tokens of a sequence, 0 = the model's")
      ->needs(plan)
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  command->add_option("--token-budget", flags->options.token_budget, "tokens of a step")
      ->needs(plan)
      ->check(CLI::Range(1, 1 << 17))
      ->capture_default_str();
  command
      ->add_option("--kv-cache-dtype", flags->kv_cache_dtype,
                   "keys and values: auto (BF16), bf16 or fp8")
      ->needs(plan)
      ->capture_default_str();
}

absl::Status PlanMemory(const std::string& path, const PlanFlags& flags) {
  int64_t card = 0;
  if (!flags.gpu_memory.empty()) {
    FQ_ASSIGN_OR_RETURN(card, ParseMemorySize(flags.gpu_memory));
  }
  FQ_ASSIGN_OR_RETURN(const int64_t reserve, ParseMemorySize(flags.reserve));
  FQ_ASSIGN_OR_RETURN(const std::optional<DType> kv_dtype, ParseKvCacheDType(flags.kv_cache_dtype));
  MemoryPlanOptions options = flags.options;
  options.kv_dtype = kv_dtype.value_or(DType::kBF16);
  const auto print = [&](const Checkpoint& checkpoint) -> absl::Status {
    FQ_ASSIGN_OR_RETURN(const MemoryPlan plan, MakeMemoryPlan(checkpoint, options));
    fmt::print("{}", DescribeMemoryPlan(plan, options, card, reserve));
    return absl::OkStatus();
  };
  if (!path.ends_with(".json")) {
    FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(path));
    return print(checkpoint);
  }
  for (const bool int4 : {true, false}) {
    FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                        MakeRandomCheckpoint(path, {.int4 = int4, .quantize = {}}));
    fmt::print("{}\n", int4 ? "INT4 with 1% outliers" : "\nBF16");
    FQ_RETURN_IF_ERROR(print(checkpoint));
  }
  return absl::OkStatus();
}

}  // namespace

void AddInspectCommand(CLI::App& app, int* exit_code) {
  struct Flags {
    std::string path;
    bool verify = false;
    bool plan = false;
    PlanFlags plan_flags;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("inspect", "Show and check a checkpoint or a .tcoo file");
  command->add_option("path", flags->path, "checkpoint folder or FILE.tcoo")->required();
  command->add_flag("--verify", flags->verify, "read everything; check every checksum and rule");
  CLI::Option* const plan = command->add_flag(
      "--plan", flags->plan,
      "what serving it takes of a GPU's memory, with no GPU needed; the path may also be a "
      "config.json, which is planned in INT4 with 1% outliers and in BF16");
  AddPlanFlags(command, plan, &flags->plan_flags);
  command->callback([flags, exit_code] {
    *exit_code = RunTool([&] {
      if (flags->plan) return PlanMemory(flags->path, flags->plan_flags);
      return flags->path.ends_with(".tcoo") ? InspectTileCooFile(flags->path)
                                            : InspectFolder(flags->path, flags->verify);
    });
  });
}

}  // namespace flashquant
