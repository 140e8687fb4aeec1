#include "engine/tools/inspect_folder.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "engine/base/natural_order.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo.h"

namespace flashquant {
namespace {

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
    std::sort(layers_.begin(), layers_.end(), [](const LayerSummary& a, const LayerSummary& b) {
      return NaturalLess(a.name, b.name);
    });
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
    std::vector<const TensorInfo*> others;
    for (const TensorInfo& tensor : tensors_.tensors()) {
      total += tensor.num_bytes;
      if (!layer_tensors_.contains(tensor.name)) others.push_back(&tensor);
    }
    std::sort(others.begin(), others.end(), [](const TensorInfo* a, const TensorInfo* b) {
      return NaturalLess(a->name, b->name);
    });
    for (const TensorInfo* tensor : others) {
      listed += tensor->num_bytes;
      fmt::print("{:<56}  {:<5}  {:<16}  {:>11}\n", tensor->name,
                 std::string(DTypeName(tensor->dtype)), ShapeText(tensor->shape),
                 tensor->num_bytes);
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

}  // namespace

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

}  // namespace flashquant
