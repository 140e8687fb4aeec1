// ModelCalibration: runs a text through a model one decoder layer at a time and collects the second
// moments of the linear layers' inputs.
//
// Held in the backend's memory: for all tokens the residual stream and one layer's attention
// outputs (tokens x hidden x 4 bytes each on the CPU, 2 on CUDA), one decoder layer and the second
// moments of one input at a time (8 bytes x K^2). A layer's attention runs once, its other parts as
// often as something before them has been quantized.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/model/activations.h"
#include "engine/model/batch_input.h"
#include "engine/model/decoder_model.h"
#include "engine/model/kv_cache.h"
#include "engine/model/model_config.h"
#include "engine/quantize/calibration.h"
#include "engine/quantize/layer_source.h"
#include "engine/quantize/observed_backend.h"
#include "engine/quantize/quantizer_device.h"

namespace flashquant {

struct ModelCalibrationOptions {
  std::string text_path;    // for the report
  int64_t num_tokens = 0;   // used: whole windows, at most this many; 0 = all
  int64_t first_token = 0;  // where to begin in the text
  int32_t context = 0;      // tokens of a window; 0 = 2048 or what the model allows, if less
  std::string backend = "cpu";
  int num_threads = 1;
};

class ModelCalibration final : public Calibration {
 public:
  // `tokens`: the whole text. `checkpoint` outlives the object and is not quantized. Errors of
  // ParseModelConfig; INVALID_ARGUMENT when the text is shorter than a window or has an id outside
  // the vocabulary; RESOURCE_EXHAUSTED when the residual stream does not fit.
  static absl::StatusOr<std::unique_ptr<ModelCalibration>> Create(
      const Checkpoint& checkpoint, std::span<const int32_t> tokens,
      const ModelCalibrationOptions& options);

  const std::vector<std::string>& layers() const override { return layer_names_; }
  absl::StatusOr<Inputs> InputsOf(const std::string& layer) override;
  absl::Status SetQuantized(const std::string& layer, std::vector<float> weights) override;
  absl::Status Restart() override;
  int64_t num_tokens() const override { return num_windows_ * context_; }
  std::string description() const override;
  std::string fingerprint() const override;

  // What the inputs lie in; for layers without calibration too.
  QuantizerOps* ops() const { return device_.ops.get(); }

 private:
  // Linear layers that have the same input, and the joined weight that the model makes of them.
  struct Stage {
    int32_t layer = 0;  // num_layers for the head
    int32_t part = 0;   // 0 .. 3: q k v, o, gate up, down
  };

  ModelCalibration(const Checkpoint& checkpoint, const ModelCalibrationOptions& options)
      : checkpoint_(checkpoint), options_(options) {}
  absl::Status Init(std::span<const int32_t> tokens);
  absl::Status PrepareBackend();
  absl::Status Embed();
  absl::StatusOr<std::vector<float>> ReadPositions() const;
  void NameLayers();
  // The decoder layer current_layer_ with what has been quantized of it.
  absl::StatusOr<const DecoderModel*> CurrentModel();
  absl::StatusOr<std::unique_ptr<DecoderModel>> LoadLayer();
  absl::Status ReloadLinear(int32_t part);
  // Runs every window through `model` from the residual stream of before; `after` (may be null) is
  // called after each, with its rows of the stream.
  using AfterWindow = std::function<absl::Status(int64_t window)>;
  absl::Status RunWindows(const DecoderModel& model, const AfterWindow& after);
  // Rows of one window from `from` to a window's place in `to`.
  absl::Status StoreWindow(const void* from, int32_t width, int64_t window, DeviceBuffer* to);
  absl::Status AdvanceTo(int32_t layer);
  absl::Status Collect(const Stage& stage);
  absl::Status CollectHead(const DecoderModel& model);

  const Checkpoint& checkpoint_;
  const ModelCalibrationOptions options_;
  ModelConfig config_;        // of the whole model
  ModelConfig layer_config_;  // of a model of one layer
  std::vector<float> rope_table_;
  QuantizerDevice device_;
  std::unique_ptr<ObservedBackend> observed_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Activations> activations_;
  std::unique_ptr<BatchInput> batch_;
  int64_t context_ = 0;
  int64_t num_windows_ = 0;
  int64_t element_bytes_ = 0;    // of an activation
  std::vector<int32_t> tokens_;  // of the windows
  DeviceBuffer row_indices_;     // 0 .. context - 1
  DeviceBuffer residual_;        // [tokens, hidden] before layer current_layer_
  DeviceBuffer attention_;       // [tokens, H * D] of layer current_layer_
  bool attention_is_known_ = false;
  int32_t current_layer_ = 0;
  std::unique_ptr<DecoderModel> model_;  // of layer current_layer_; null: not loaded
  std::set<int32_t> stale_parts_;        // quantized since it was loaded
  std::vector<std::string> layer_names_;
  std::map<std::string, Stage> stages_;
  uint32_t tokens_checksum_ = 0;
  std::map<std::string, ReplacedWeight> quantized_;  // of the current layer
  Stage collected_{-1, -1};
};

}  // namespace flashquant
