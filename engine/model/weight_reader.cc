#include "engine/model/weight_reader.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

absl::StatusOr<LinearStorage> WeightReader::ReadLinear(const LinearShape& shape) const {
  const ScopedTime time(&working_);
  LinearStorage storage(shape.parts.size());
  for (size_t i = 0; i < shape.parts.size(); ++i) {
    FQ_RETURN_IF_ERROR(ReadPart(shape.parts[i], shape.k, &storage[i]));
  }
  return storage;
}

absl::StatusOr<std::vector<float>> WeightReader::ReadFloats(
    const std::string& name, const std::vector<int64_t>& shape) const {
  const ScopedTime time(&working_);
  return Floats(name, shape);
}

absl::StatusOr<float> WeightReader::ReadKvScale(std::span<const std::string> names) const {
  const ScopedTime time(&working_);
  for (const std::string& name : names) {
    const TensorInfo* info = tensors_.Find(name);
    if (info == nullptr) continue;
    if (info->num_bytes != DTypeBytes(info->dtype)) {
      return DataLossError("tensor {}: wrong shape (needs a single number, got [{}])", name,
                           fmt::join(info->shape, ", "));
    }
    float scale = 0.0f;
    FQ_RETURN_IF_ERROR(tensors_.ReadRowsAsFloat(*info, 0, 1, &scale));
    // Its inverse is used too.
    if (!std::isfinite(scale) || scale <= 0.0f || !std::isfinite(1.0f / scale)) {
      return DataLossError("tensor {}: {} is no scale", name, scale);
    }
    return scale;
  }
  return 1.0f;
}

LoadSeconds WeightReader::times() const {
  const double read = tensors_.seconds();
  return {.read = read, .verify = std::max(0.0, working_.seconds() - read)};
}

absl::StatusOr<std::vector<float>> WeightReader::Floats(const std::string& name,
                                                        const std::vector<int64_t>& shape) const {
  FQ_ASSIGN_OR_RETURN(const TensorInfo* info, Require(name, shape));
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  std::vector<float> values(static_cast<size_t>(count));
  FQ_RETURN_IF_ERROR(tensors_.ReadRowsAsFloat(*info, 0, info->num_rows(), values.data()));
  return values;
}

absl::StatusOr<const TensorInfo*> WeightReader::Require(const std::string& name,
                                                        const std::vector<int64_t>& shape) const {
  const TensorInfo* info = tensors_.Find(name);
  if (info == nullptr) return DataLossError("tensor {}: missing", name);
  if (info->shape != shape) {
    return DataLossError("tensor {}: wrong shape (needs [{}], got [{}])", name,
                         fmt::join(shape, ", "), fmt::join(info->shape, ", "));
  }
  return info;
}

absl::Status WeightReader::ReadPart(const LinearPartShape& name, int64_t k,
                                    PartStorage* storage) const {
  if (name.has_bias) {
    const std::string bias_name = name.name + ".bias";
    FQ_ASSIGN_OR_RETURN(const std::vector<float> values, Floats(bias_name, {name.n}));
    storage->bias.reserve(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      storage->bias.push_back(ToBFloat16(values[i]));
      if (!IsFinite(storage->bias.back())) {
        return DataLossError("tensor {}: element {} is not finite", bias_name, i);
      }
    }
    storage->part.bias = storage->bias.data();
  }
  if (IsQuantizedLinear(tensors_, name.name)) return ReadQuantizedPart(name, k, storage);
  return ReadDensePart(name, k, storage);
}

absl::Status WeightReader::ReadQuantizedPart(const LinearPartShape& name, int64_t k,
                                             PartStorage* storage) const {
  if (!config_.quantization.has_value()) {
    return DataLossError("tensor {}.qweight: config.json has no quantization_config", name.name);
  }
  FQ_ASSIGN_OR_RETURN(storage->quantized,
                      ReadQuantizedLinear(tensors_, *config_.quantization, name.name, name.n, k));
  storage->part.int4 = &storage->quantized.weight;
  if (storage->quantized.outliers.has_value()) {
    storage->part.outliers = &*storage->quantized.outliers;
  }
  return absl::OkStatus();
}

absl::Status WeightReader::ReadDensePart(const LinearPartShape& name, int64_t k,
                                         PartStorage* storage) const {
  const std::string weight_name = name.name + ".weight";
  FQ_ASSIGN_OR_RETURN(const TensorInfo* info, Require(weight_name, {name.n, k}));
  switch (info->dtype) {
    case DType::kBF16:
    case DType::kF16:
    case DType::kF32:
      break;
    case DType::kI8: {
      const std::string scale_name = weight_name + "_scale";
      FQ_ASSIGN_OR_RETURN(const TensorInfo* scale, Require(scale_name, {name.n, 1}));
      if (scale->dtype != DType::kBF16) {
        return DataLossError("tensor {}: dtype {} (needs BF16)", scale_name,
                             DTypeName(scale->dtype));
      }
      FQ_ASSIGN_OR_RETURN(storage->row_scales, tensors_.ReadBytes(scale_name));
      storage->part.row_scales = reinterpret_cast<const BFloat16*>(storage->row_scales.data());
      for (int64_t row = 0; row < name.n; ++row) {
        if (!IsFinite(storage->part.row_scales[row])) {
          return DataLossError("tensor {}: row {} is not finite", scale_name, row);
        }
      }
      break;
    }
    default:
      return DataLossError("tensor {}: dtype {} (needs BF16, F16, F32 or I8)", weight_name,
                           DTypeName(info->dtype));
  }
  // Not a vector, which would fill it with zeros first: a gigabyte and more for a large model.
  storage->dense = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(info->num_bytes));
  FQ_RETURN_IF_ERROR(tensors_.Read(*info, storage->dense.get()));
  storage->part.dense = TensorView{storage->dense.get(), info->dtype, {name.n, k}};
  return absl::OkStatus();
}

LinearReadAhead::LinearReadAhead(const WeightReader* reader, std::vector<LinearShape> shapes,
                                 int num_threads)
    : reader_(reader),
      shapes_(std::move(shapes)),
      window_(static_cast<size_t>(num_threads)),
      read_(shapes_.size()) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
}

LinearReadAhead::~LinearReadAhead() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void LinearReadAhead::Work() {
  for (;;) {
    size_t index = 0;
    {
      MutexLock lock(&mu_);
      while (!stop_ && next_read_ < shapes_.size() && next_read_ >= next_taken_ + window_) {
        changed_.Wait(&mu_);
      }
      if (stop_ || next_read_ == shapes_.size()) return;
      index = next_read_++;
    }
    absl::StatusOr<LinearStorage> storage = reader_->ReadLinear(shapes_[index]);
    MutexLock lock(&mu_);
    read_[index] = std::move(storage);
    changed_.NotifyAll();
  }
}

absl::StatusOr<LinearStorage> LinearReadAhead::Take() {
  MutexLock lock(&mu_);
  FQ_CHECK(next_taken_ < shapes_.size());
  std::optional<absl::StatusOr<LinearStorage>>& place = read_[next_taken_];
  while (!place.has_value()) changed_.Wait(&mu_);
  absl::StatusOr<LinearStorage> storage = *std::move(place);
  place.reset();
  ++next_taken_;
  changed_.NotifyAll();
  return storage;
}

}  // namespace flashquant
