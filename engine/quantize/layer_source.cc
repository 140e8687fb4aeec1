#include "engine/quantize/layer_source.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "engine/model/model_layout.h"
#include "fmt/format.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr std::string_view kWeightSuffix = ".weight";

}  // namespace

LayerSource::LayerSource(const TensorSource& model, const ModelConfig& config, int32_t layer,
                         const std::map<std::string, ReplacedWeight>& replaced)
    : model_(model),
      replaced_(replaced),
      prefix_(fmt::format("{}layers.{}.", NamePrefix(config.family), layer)),
      first_layer_(fmt::format("{}layers.0.", NamePrefix(config.family))),
      embedding_(EmbeddingShape(config).parts[0].name + ".weight") {
  const int64_t hidden = config.hidden_size;
  tensors_.push_back({embedding_, DType::kF32, {1, hidden}, hidden * 4});
  const std::string final_norm = FinalNorm(config).name + ".";
  for (const TensorInfo& tensor : model.tensors()) {
    TensorInfo info = tensor;
    if (tensor.name.starts_with(prefix_)) {
      info.name = first_layer_ + tensor.name.substr(prefix_.size());
      if (tensor.name.ends_with(kWeightSuffix)) {
        const auto found =
            replaced.find(tensor.name.substr(0, tensor.name.size() - kWeightSuffix.size()));
        if (found != replaced.end()) {
          info.dtype = found->second.dtype;
          info.num_bytes = static_cast<int64_t>(found->second.bytes.size());
        }
      }
    } else if (!tensor.name.starts_with(final_norm) && tensor.name != kPositionsName) {
      continue;
    }
    tensors_.push_back(std::move(info));
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
}

absl::Status LayerSource::ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                                   void* out) const {
  if (tensor.name == embedding_) {
    std::memset(out, 0, static_cast<size_t>(tensor.num_bytes));
    return absl::OkStatus();
  }
  std::string name = tensor.name;
  if (name.starts_with(first_layer_)) name = prefix_ + name.substr(first_layer_.size());
  if (name.ends_with(kWeightSuffix)) {
    const auto found = replaced_.find(name.substr(0, name.size() - kWeightSuffix.size()));
    if (found != replaced_.end()) {
      const int64_t row_bytes = tensor.shape[1] * DTypeBytes(found->second.dtype);
      std::memcpy(out, found->second.bytes.data() + first_row * row_bytes,
                  static_cast<size_t>(num_rows * row_bytes));
      return absl::OkStatus();
    }
  }
  const TensorInfo* source = model_.Find(name);
  if (source == nullptr) return DataLossError("tensor {}: missing", name);
  return model_.ReadRows(*source, first_row, num_rows, out);
}

}  // namespace flashquant
