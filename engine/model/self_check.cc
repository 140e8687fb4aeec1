// Linear layers and the embedding; the other ops: self_check_ops.cc.
#include "engine/model/self_check.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "engine/checkpoint/quantized_tensors.h"
#include "engine/model/model_layout.h"
#include "engine/model/self_check_support.h"
#include "engine/model/weight_reader.h"

namespace flashquant {
namespace {

constexpr int64_t kFeaturesPerPart = 24;
constexpr int32_t kPromptRows = 128;
constexpr uint32_t kSeed = 20251;

using Row = std::vector<float>;

// First, last and evenly between, an odd step so that all places of a tile come up.
std::vector<int64_t> SampledFeatures(int64_t n) {
  std::set<int64_t> features = {0, n - 1};
  const int64_t step = std::max<int64_t>(1, n / kFeaturesPerPart) | 1;
  for (int64_t feature = 0; feature < n; feature += step) features.insert(feature);
  return {features.begin(), features.end()};
}

// The weight's rows for `features` of one part, from the checkpoint.
class HostRows {
 public:
  HostRows(const TensorSource& tensors, const ModelConfig& config)
      : tensors_(tensors), reader_(tensors, config) {}

  absl::StatusOr<std::vector<Row>> Read(const LinearPartShape& part, int64_t k,
                                        const std::vector<int64_t>& features) const {
    return IsQuantizedLinear(tensors_, part.name) ? ReadInt4(part, k, features)
                                                  : ReadDense(part, k, features);
  }
  absl::StatusOr<float> Bias(const LinearPartShape& part, int64_t feature) const {
    if (!part.has_bias) return 0.0f;
    return Element(part.name + ".bias", feature);
  }

 private:
  absl::StatusOr<float> Element(const std::string& name, int64_t row) const {
    const TensorInfo* info = tensors_.Find(name);
    if (info == nullptr) return DataLossError("tensor {}: missing", name);
    float value = 0;
    FQ_RETURN_IF_ERROR(tensors_.ReadRowsAsFloat(*info, row, 1, &value));
    return value;
  }

  absl::StatusOr<std::vector<Row>> ReadDense(const LinearPartShape& part, int64_t k,
                                             const std::vector<int64_t>& features) const {
    const std::string name = part.name + ".weight";
    const TensorInfo* info = tensors_.Find(name);
    if (info == nullptr) return DataLossError("tensor {}: missing", name);
    std::vector<Row> rows(features.size(), Row(static_cast<size_t>(k)));
    for (size_t i = 0; i < features.size(); ++i) {
      if (info->dtype != DType::kI8) {
        FQ_RETURN_IF_ERROR(tensors_.ReadRowsAsFloat(*info, features[i], 1, rows[i].data()));
        continue;
      }
      std::vector<int8_t> codes(static_cast<size_t>(k));
      FQ_RETURN_IF_ERROR(tensors_.ReadRows(*info, features[i], 1, codes.data()));
      FQ_ASSIGN_OR_RETURN(const float scale, Element(name + "_scale", features[i]));
      for (size_t j = 0; j < codes.size(); ++j) {
        rows[i][j] = scale * static_cast<float>(codes[j]);
      }
    }
    return rows;
  }

  absl::StatusOr<std::vector<Row>> ReadInt4(const LinearPartShape& part, int64_t k,
                                            const std::vector<int64_t>& features) const {
    FQ_ASSIGN_OR_RETURN(const LinearStorage storage, reader_.ReadLinear({{part}, k}));
    const Int4Weight& weight = *storage[0].part.int4;
    std::vector<Row> rows(features.size(), Row(static_cast<size_t>(k)));
    std::map<int64_t, size_t> place;
    for (size_t i = 0; i < features.size(); ++i) {
      place[features[i]] = i;
      for (int64_t j = 0; j < k; ++j) {
        const int64_t group = j / weight.group_size;
        const auto scale_at = static_cast<size_t>(features[i] * weight.groups_per_row() + group);
        const int32_t level = weight.Code(features[i], j) - weight.ZeroPoint(features[i], group);
        rows[i][static_cast<size_t>(j)] =
            ToFloat(weight.scales[scale_at]) * static_cast<float>(level);
      }
    }
    const TileCooMatrix* outliers = storage[0].part.outliers;
    if (outliers == nullptr) return rows;
    outliers->ForEachSlot([&](int64_t column_k, int64_t feature, uint16_t bits) {
      const auto found = place.find(feature);
      if (found == place.end()) return;
      rows[found->second][static_cast<size_t>(column_k)] +=
          TileCooValue(outliers->geometry().value_type, bits);
    });
    return rows;
  }

  const TensorSource& tensors_;
  const WeightReader reader_;
};

// What layers must share for one of them to stand for the others.
std::string KindOf(const TensorSource& tensors, const LinearShape& shape) {
  std::string kind = fmt::format("{}", shape.k);
  for (const LinearPartShape& part : shape.parts) {
    const TensorInfo* dense = tensors.Find(part.name + ".weight");
    kind += fmt::format(" {} {} {}", part.n, part.has_bias,
                        dense != nullptr ? DTypeName(dense->dtype) : "int4");
  }
  return kind;
}

class LinearCheck {
 public:
  LinearCheck(const Checkpoint& checkpoint, const DecoderModel& model, int32_t max_rows,
              Backend* backend)
      : tensors_(*checkpoint.tensors),
        host_(*checkpoint.tensors, model.config()),
        backend_(backend) {
    const int32_t step = backend->info().row_multiple;
    for (const int32_t rows : {step, 2 * step, 4 * step, std::min(max_rows, kPromptRows)}) {
      if (rows <= std::max(max_rows, step)) row_counts_.insert(rows);
    }
  }

  absl::Status Run(const LinearShape& shape, const LinearWeight& weight, DType y_dtype) {
    if (shape.parts.empty() || !seen_.insert(KindOf(tensors_, shape)).second) {
      return absl::OkStatus();
    }
    const auto k = static_cast<size_t>(shape.k);
    const auto n = static_cast<size_t>(shape.n());
    const auto most_rows = static_cast<size_t>(*row_counts_.rbegin());
    const std::vector<float> x = SelfCheckValues(most_rows * k, kSeed);
    FQ_ASSIGN_OR_RETURN(const DeviceBuffer device_x, UploadActivations(x, backend_));
    FQ_ASSIGN_OR_RETURN(
        const DeviceBuffer device_y,
        backend_->Allocate(static_cast<int64_t>(most_rows * n) * DTypeBytes(y_dtype)));
    FQ_RETURN_IF_ERROR(Sample(shape));
    for (const int32_t rows : row_counts_) {
      const std::string what = fmt::format("{} and its like, {} rows", shape.parts[0].name, rows);
      FQ_RETURN_IF_ERROR(Annotate(backend_->Linear({.num_rows = rows,
                                                    .weight = &weight,
                                                    .x = device_x.data(),
                                                    .y = device_y.data(),
                                                    .y_dtype = y_dtype}),
                                  what));
      const auto count = static_cast<size_t>(rows) * n;
      FQ_ASSIGN_OR_RETURN(const std::vector<float> y, Download(device_y, count, y_dtype, backend_));
      FQ_RETURN_IF_ERROR(Compare(what, static_cast<size_t>(rows), n, x, y));
    }
    return absl::OkStatus();
  }

 private:
  struct Sampled {
    size_t feature = 0;  // of the joined layer
    float bias = 0;
    Row weights;
  };

  absl::Status Sample(const LinearShape& shape) {
    sampled_.clear();
    int64_t first = 0;
    for (const LinearPartShape& part : shape.parts) {
      const std::vector<int64_t> features = SampledFeatures(part.n);
      FQ_ASSIGN_OR_RETURN(std::vector<Row> rows, host_.Read(part, shape.k, features));
      for (size_t i = 0; i < features.size(); ++i) {
        FQ_ASSIGN_OR_RETURN(const float bias, host_.Bias(part, features[i]));
        sampled_.push_back({static_cast<size_t>(first + features[i]), bias, std::move(rows[i])});
      }
      first += part.n;
    }
    return absl::OkStatus();
  }

  absl::Status Compare(const std::string& what, size_t rows, size_t n, const std::vector<float>& x,
                       const std::vector<float>& y) const {
    std::vector<float> actual;
    std::vector<double> expected;
    for (const size_t row : std::set<size_t>{0, rows / 2, rows - 1}) {
      for (const Sampled& sampled : sampled_) {
        const float* inputs = x.data() + row * sampled.weights.size();
        double sum = static_cast<double>(sampled.bias);
        for (size_t j = 0; j < sampled.weights.size(); ++j) {
          sum += static_cast<double>(inputs[j]) * static_cast<double>(sampled.weights[j]);
        }
        expected.push_back(sum);
        actual.push_back(y[row * n + sampled.feature]);
      }
    }
    return CompareWithHost(what, actual, expected, *backend_);
  }

  const TensorSource& tensors_;
  const HostRows host_;
  Backend* const backend_;
  std::set<int32_t> row_counts_;
  std::set<std::string> seen_;
  std::vector<Sampled> sampled_;
};

absl::Status CheckEmbedding(const TensorSource& tensors, const DecoderModel& model,
                            Backend* backend) {
  const ModelConfig& config = model.config();
  const LinearPartShape part = EmbeddingShape(config).parts[0];
  const std::vector<int64_t> rows = SampledFeatures(part.n);
  FQ_ASSIGN_OR_RETURN(const std::vector<Row> table,
                      HostRows(tensors, config).Read(part, config.hidden_size, rows));
  const std::vector<int32_t> ids(rows.begin(), rows.end());
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer device_ids, UploadAll(ids, backend));
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer previous,
                      UploadAll(std::vector<int32_t>(ids.size(), -1), backend));
  const DType dtype = backend->info().activation_dtype;
  const size_t count = ids.size() * static_cast<size_t>(config.hidden_size);
  FQ_ASSIGN_OR_RETURN(const DeviceBuffer out,
                      backend->Allocate(static_cast<int64_t>(count) * DTypeBytes(dtype)));
  FQ_RETURN_IF_ERROR(backend->Embedding({.num_tokens = static_cast<int32_t>(ids.size()),
                                         .token_ids = device_ids.As<int32_t>(),
                                         .previous_rows = previous.As<int32_t>(),
                                         .table = model.weights().embedding.get(),
                                         .out = out.data()}));
  FQ_ASSIGN_OR_RETURN(const std::vector<float> actual, Download(out, count, dtype, backend));
  std::vector<double> expected;
  for (const Row& row : table) expected.insert(expected.end(), row.begin(), row.end());
  return CompareWithHost(part.name, actual, expected, *backend);
}

}  // namespace

absl::Status CheckLayers(const Checkpoint& checkpoint, const DecoderModel& model, int32_t max_rows,
                         Backend* backend) {
  const ModelConfig& config = model.config();
  const ModelWeights& weights = model.weights();
  const DType dtype = backend->info().activation_dtype;
  FQ_RETURN_IF_ERROR(CheckEmbedding(*checkpoint.tensors, model, backend));
  LinearCheck check(checkpoint, model, max_rows, backend);
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const LayerWeights& of_layer = weights.layers[static_cast<size_t>(layer)];
    const auto shapes = LayerLinears(config, layer);
    const std::array<const LinearWeight*, kLinearsPerLayer> packed = {
        of_layer.qkv.get(), of_layer.output.get(), of_layer.gate_up.get(), of_layer.down.get()};
    for (size_t i = 0; i < kLinearsPerLayer; ++i) {
      FQ_RETURN_IF_ERROR(check.Run(shapes[i], *packed[i], dtype));
    }
  }
  const LinearShape head =
      weights.own_lm_head != nullptr ? HeadShape(config) : EmbeddingShape(config);
  FQ_RETURN_IF_ERROR(check.Run(head, *weights.lm_head(), DType::kF32));
  return CheckOps(config, backend);
}

}  // namespace flashquant
