// Import of a GPTQ checkpoint (AutoGPTQ, GPTQModel, Optimum): a folder whose linear layers are
// four tensors each, `qweight`, `qzeros`, `scales` and `g_idx`.
//
// Used by the quantizer and the quality commands only; nothing is served from such a folder. Its
// layers are shown as ordinary FP32 matrices `‹layer›.weight`, dequantized when they are read, and
// can be had as codes (gptq_import.h takes those over as they are).
//
// Source: the format as AutoGPTQ's and GPTQModel's packers write it. Codes of 8 inputs share an
// I32 [K/8, N], lowest bits first; zero points of 8 outputs an I32 [groups, N/8]. Format "gptq"
// ("v1") stores zero points less one, "gptq_v2" as they are.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/tensor_source.h"
#include "kernels/base/mutex.h"

namespace flashquant {

struct GptqConfig {
  int64_t group_size = 128;  // inputs that share a scale; -1: all of a row
  bool stores_zero_less_one = true;
  // The packer took one from whole 32-bit words (GPTQModel), so that a zero point of 0 borrows from
  // its neighbour. Else the word of such a zero point cannot be told from damage.
  bool subtracts_from_words = false;
};

// The codes of one layer: dequant(n, k) = scales[n, g] * (codes[n, k] - zeros[n, g]) with
// g = group_of[k], exact in float32 for F16 and BF16 scales.
struct GptqLayer {
  int64_t n = 0;
  int64_t k = 0;
  int64_t num_groups = 0;
  std::vector<uint8_t> codes;     // [n, k] 0..15
  std::vector<uint8_t> zeros;     // [n, num_groups] 0..15
  std::vector<float> scales;      // [n, num_groups] finite
  std::vector<int32_t> group_of;  // [k]

  // The matrix [n, k].
  std::vector<float> Dequantize() const;
};

class GptqTensors final : public TensorSource {
 public:
  // DATA_LOSS for a layer with a missing tensor, a wrong shape or dtype. Reads `g_idx` only.
  static absl::StatusOr<std::unique_ptr<GptqTensors>> Create(std::string path,
                                                             std::unique_ptr<TensorSource> folder,
                                                             const GptqConfig& config);

  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  // Any rows of a layer cost reading and unpacking the whole of it; the last one is kept.
  absl::Status ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                        void* out) const override;

  // `layer` is a name without ".weight".
  bool HasCodes(std::string_view layer) const { return layers_.contains(std::string(layer)); }
  // DATA_LOSS for a scale that is not finite; UNIMPLEMENTED for a zero point of 16, which no 4-bit
  // number holds (see stores_zero_less_one).
  absl::StatusOr<GptqLayer> ReadLayer(std::string_view layer) const;
  // Inputs k * group_size .. belong to group k, as our format has it. Without: act-order, where a
  // group's inputs lie anywhere.
  bool HasContiguousGroups(std::string_view layer) const;
  bool HasActOrder() const;
  // Reads the zero points of all layers.
  absl::StatusOr<bool> AllZeroPointsAreEight() const;

  const GptqConfig& config() const { return config_; }
  const std::string& path() const { return path_; }

 private:
  struct Layer {
    int64_t n = 0;
    int64_t k = 0;
    std::vector<int32_t> group_of;  // empty: contiguous
  };

  GptqTensors(std::string path, std::unique_ptr<TensorSource> folder, const GptqConfig& config)
      : path_(std::move(path)), folder_(std::move(folder)), config_(config) {}
  absl::Status Init();
  absl::Status AddLayer(const std::string& name, const TensorInfo& codes);
  absl::StatusOr<std::vector<int32_t>> ReadGroupOf(const std::string& name, int64_t k,
                                                   int64_t num_groups) const;
  absl::Status UnpackZeros(const std::string& name, GptqLayer* layer) const;

  const std::string path_;
  const std::unique_ptr<TensorSource> folder_;
  const GptqConfig config_;
  std::map<std::string, Layer> layers_;
  std::vector<TensorInfo> infos_;
  mutable Mutex mutex_;
  mutable std::string last_name_ ABSL_GUARDED_BY(mutex_);
  mutable std::shared_ptr<const std::vector<float>> last_weights_ ABSL_GUARDED_BY(mutex_);
};

// `checkpoint` as it is, unless its config.json (or quantize_config.json) says GPTQ: then the same
// with GptqTensors for its tensors, and no quantization_config. UNIMPLEMENTED, by name, for widths
// other than 4 bits, other packings and options per layer.
absl::StatusOr<Checkpoint> DequantizeIfGptq(Checkpoint checkpoint);

// nullptr for another kind of source.
const GptqTensors* AsGptq(const TensorSource& tensors);

}  // namespace flashquant
