// Reading a decoder's tensors into host memory, checked: one linear layer's parts at a time, or
// many layers in order, the next ones read by other threads while one is packed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "engine/model/load_times.h"
#include "engine/model/model_config.h"
#include "engine/model/model_layout.h"
#include "kernels/backend.h"
#include "kernels/base/mutex.h"

namespace flashquant {

// Host tensors of one part of a linear layer; `part` points into them, so they do not move.
struct PartStorage {
  std::unique_ptr<uint8_t[]> dense;
  std::vector<uint8_t> row_scales;
  std::vector<BFloat16> bias;
  QuantizedLinearTensors quantized;
  LinearPart part;
};
using LinearStorage = std::vector<PartStorage>;

// Safe from several threads. `tensors` and `config` outlive it.
class WeightReader final {
 public:
  WeightReader(const TensorSource& tensors, const ModelConfig& config)
      : tensors_(tensors), config_(config) {}

  // All parts of one linear layer. DATA_LOSS for a missing tensor, a wrong shape or dtype and all
  // that ReadQuantizedLinear finds. A bias is rounded to BF16.
  absl::StatusOr<LinearStorage> ReadLinear(const LinearShape& shape) const;
  // A tensor of `shape` as FP32: norms, positions.
  absl::StatusOr<std::vector<float>> ReadFloats(const std::string& name,
                                                const std::vector<int64_t>& shape) const;
  // The number in the first of the tensors that there is, [] or [1]; 1 when there is none.
  // DATA_LOSS for more numbers than one, or one that is not finite and above 0.
  absl::StatusOr<float> ReadKvScale(std::span<const std::string> names) const;
  // `read` and `verify` so far.
  LoadSeconds times() const;

 private:
  absl::StatusOr<std::vector<float>> Floats(const std::string& name,
                                            const std::vector<int64_t>& shape) const;
  absl::StatusOr<const TensorInfo*> Require(const std::string& name,
                                            const std::vector<int64_t>& shape) const;
  absl::Status ReadPart(const LinearPartShape& name, int64_t k, PartStorage* storage) const;
  absl::Status ReadQuantizedPart(const LinearPartShape& name, int64_t k,
                                 PartStorage* storage) const;
  absl::Status ReadDensePart(const LinearPartShape& name, int64_t k, PartStorage* storage) const;

  const TimedTensors tensors_;
  const ModelConfig& config_;
  mutable TimeSum working_;  // reading and checking
};

// Reads linear layers ahead of the one that is taken. At most num_threads + 1 are held at a time.
class LinearReadAhead final {
 public:
  // `reader` outlives it. num_threads >= 1.
  LinearReadAhead(const WeightReader* reader, std::vector<LinearShape> shapes, int num_threads);
  ~LinearReadAhead();
  LinearReadAhead(const LinearReadAhead&) = delete;
  LinearReadAhead& operator=(const LinearReadAhead&) = delete;

  // The next one, in the order of `shapes`; as many calls as there are shapes.
  absl::StatusOr<LinearStorage> Take();

 private:
  void Work();

  const WeightReader* const reader_;
  const std::vector<LinearShape> shapes_;
  const size_t window_;
  Mutex mu_;
  CondVar changed_;
  std::vector<std::optional<absl::StatusOr<LinearStorage>>> read_ ABSL_GUARDED_BY(mu_);
  size_t next_read_ ABSL_GUARDED_BY(mu_) = 0;
  size_t next_taken_ ABSL_GUARDED_BY(mu_) = 0;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace flashquant
