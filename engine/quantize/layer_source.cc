#include "engine/quantize/layer_source.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "fmt/format.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr std::string_view kFirstLayer = "model.layers.0.";
constexpr std::string_view kWeightSuffix = ".weight";
constexpr std::string_view kEmbedding = "model.embed_tokens.weight";
constexpr std::string_view kFinalNorm = "model.norm.weight";

}  // namespace

LayerSource::LayerSource(const TensorSource& model, int32_t layer, int64_t hidden_size,
                         const std::map<std::string, std::vector<float>>& replaced)
    : model_(model), replaced_(replaced), prefix_(fmt::format("model.layers.{}.", layer)) {
  tensors_.push_back({std::string(kEmbedding), DType::kF32, {1, hidden_size}, hidden_size * 4});
  for (const TensorInfo& tensor : model.tensors()) {
    TensorInfo info = tensor;
    if (tensor.name.starts_with(prefix_)) {
      info.name = std::string(kFirstLayer) + tensor.name.substr(prefix_.size());
      if (tensor.name.ends_with(kWeightSuffix)) {
        const auto found =
            replaced.find(tensor.name.substr(0, tensor.name.size() - kWeightSuffix.size()));
        if (found != replaced.end()) {
          info.dtype = DType::kF32;
          info.num_bytes = static_cast<int64_t>(found->second.size() * sizeof(float));
        }
      }
    } else if (tensor.name != kFinalNorm) {
      continue;
    }
    tensors_.push_back(std::move(info));
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
}

absl::Status LayerSource::ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                                   void* out) const {
  if (tensor.name == kEmbedding) {
    std::memset(out, 0, static_cast<size_t>(tensor.num_bytes));
    return absl::OkStatus();
  }
  std::string name = tensor.name;
  if (name.starts_with(kFirstLayer)) name = prefix_ + name.substr(kFirstLayer.size());
  if (name.ends_with(kWeightSuffix)) {
    const auto found = replaced_.find(name.substr(0, name.size() - kWeightSuffix.size()));
    if (found != replaced_.end()) {
      const size_t per_row = static_cast<size_t>(tensor.shape[1]);
      std::memcpy(out, found->second.data() + static_cast<size_t>(first_row) * per_row,
                  static_cast<size_t>(num_rows) * per_row * sizeof(float));
      return absl::OkStatus();
    }
  }
  const TensorInfo* source = model_.Find(name);
  if (source == nullptr) return DataLossError("tensor {}: missing", name);
  return model_.ReadRows(*source, first_row, num_rows, out);
}

}  // namespace flashquant
