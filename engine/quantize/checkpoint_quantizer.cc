#include "engine/quantize/checkpoint_quantizer.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/checkpoint/json.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "engine/quantize/background_task.h"
#include "engine/quantize/cpu_quantizer_ops.h"
#include "engine/quantize/density_budget.h"
#include "engine/quantize/layer_journal.h"
#include "engine/quantize/layer_quantizer.h"
#include "engine/quantize/output_folder.h"
#include "engine/quantize/stage_clock.h"
#include "engine/quantize/tensor_conversion.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo_encoder.h"

namespace flashquant {
namespace {

// A quantized layer on its way to the file.
struct FinishedLayer {
  const PlannedTensor* planned = nullptr;
  std::vector<float> weights;
  QuantizedMatrix matrix;
  bool is_new = false;  // not from the journal
  LayerReport report;
};

class CheckpointQuantizer final {
 public:
  CheckpointQuantizer(const Checkpoint& checkpoint, const QuantizeOptions& options,
                      QuantizePlan plan, CheckpointWriter* writer, const QuantizeProgress& progress,
                      Calibration* calibration, const std::string& journal_folder)
      : checkpoint_(checkpoint),
        tensors_(*checkpoint.tensors),
        options_(options),
        plan_(std::move(plan)),
        writer_(writer),
        progress_(progress),
        calibration_(calibration),
        cpu_ops_(options.num_threads),
        ops_(options.ops != nullptr ? options.ops : &cpu_ops_),
        layer_quantizer_(options, plan_.group_size, config_.geometry.tile_k,
                         options.imported != AsGptq(*checkpoint.tensors), ops_, calibration),
        journal_(journal_folder, Fingerprint()) {
    config_.group_size = plan_.group_size;
    config_.symmetric = options.symmetric;
    config_.target_density =
        options.threshold > 0 || options.target_bytes > 0 ? 0 : options.density;
    config_.method = options.imported != nullptr               ? "imported gptq"
                     : options.method == QuantizeMethod::kGptq ? "gptq"
                                                               : "rtn";
    if (options.density > 0 || options.threshold > 0 || options.target_bytes > 0) {
      config_.method += "+outliers";
    }
    if (calibration != nullptr) OrderByForwardPass();
    report_.group_size = plan_.group_size;
    report_.symmetric = options.symmetric;
    report_.method = config_.method;
    report_.target_density = config_.target_density;
    report_.threshold = options.threshold;
    report_.target_bytes = options.target_bytes;
    if (calibration != nullptr) report_.calibration = calibration->description();
    report_.embedding = TableFormatName(plan_.embedding);
    report_.lm_head = plan_.tied_head ? "tied" : std::string(TableFormatName(plan_.lm_head));
    report_.notes = plan_.notes;
  }

  absl::Status WriteTensors() {
    if (progress_) progress_(0, plan_.total_weights, "");
    if (options_.target_bytes > 0) FQ_RETURN_IF_ERROR(ChooseRecords());
    for (size_t i = 0; i < plan_.tensors.size(); ++i) {
      const PlannedTensor& planned = plan_.tensors[i];
      if (planned.action == TensorAction::kInt4) {
        absl::StatusOr<std::unique_ptr<FinishedLayer>> layer = MakeLayer(i);
        if (!layer.ok()) return Annotate(layer.status(), planned.source);
        FQ_RETURN_IF_ERROR(FinishWriting());
        finished_ = *std::move(layer);
        writing_.Start([this] { return WriteLayer(finished_.get()); });
        continue;
      }
      FQ_RETURN_IF_ERROR(FinishWriting());
      const StageClock clock(&report_.seconds.writing);
      const absl::Status status = WriteTensor(planned, *tensors_.Find(planned.source));
      if (!status.ok()) return Annotate(status, planned.source);
      if (planned.action != TensorAction::kCopy) ReportDone(planned);
    }
    FQ_RETURN_IF_ERROR(FinishWriting());
    const QuantizeSeconds& layers = layer_quantizer_.seconds();
    report_.seconds.calibration = layers.calibration;
    report_.seconds.factors = layers.factors;
    report_.seconds.layers = layers.layers;
    report_.seconds.results = layers.results;
    if (options_.imported != nullptr) {
      report_.notes.push_back(fmt::format(
          "codes of a GPTQ checkpoint: with BF16 scales no weight of it moves by more than {:.3f}%",
          100 * layer_quantizer_.largest_import_change()));
    }
    report_.tensor_bytes = writer_->tensor_bytes();
    config_.stored_density = report_.Total().stored_density();
    return absl::OkStatus();
  }

  nlohmann::json Config() const {
    nlohmann::json config = checkpoint_.config;
    nlohmann::json section = QuantizationConfigJson(config_);
    section["embedding"] = report_.embedding;
    section["lm_head"] = report_.lm_head;
    config["quantization_config"] = std::move(section);
    return config;
  }

  const QuantizeReport& report() const { return report_; }
  // After the last layer, or when a run ends early.
  void RemoveJournal() {
    (void)reading_.Wait();
    (void)writing_.Wait();
    journal_.Remove();
  }

 private:
  // Linear layers in the order of the calibration, after everything else.
  void OrderByForwardPass() {
    const std::vector<std::string>& layers = calibration_->layers();
    const auto rank = [&](const PlannedTensor& planned) {
      if (planned.action != TensorAction::kInt4) return std::ptrdiff_t{-1};
      return std::find(layers.begin(), layers.end(), planned.name) - layers.begin();
    };
    std::stable_sort(
        plan_.tensors.begin(), plan_.tensors.end(),
        [&](const PlannedTensor& a, const PlannedTensor& b) { return rank(a) < rank(b); });
  }

  absl::StatusOr<std::vector<float>> ReadWeights(const PlannedTensor& planned) const {
    std::vector<float> weights(static_cast<size_t>(planned.n * planned.k));
    FQ_RETURN_IF_ERROR(
        tensors_.ReadRowsAsFloat(*tensors_.Find(planned.source), 0, planned.n, weights.data()));
    FQ_RETURN_IF_ERROR(CheckWeights(planned.source, weights, planned.k, options_.num_threads));
    return weights;
  }

  // A first pass over the layers, each with the inputs that the original model gives it, tells what
  // outliers are worth in each.
  absl::Status ChooseRecords() {
    FQ_ASSIGN_OR_RETURN(const int64_t budget,
                        RecordsThatFit(plan_, tensors_, options_.symmetric, config_.geometry,
                                       options_.target_bytes));
    std::vector<LayerCurve> curves;
    for (const PlannedTensor& planned : plan_.tensors) {
      if (planned.action != TensorAction::kInt4) continue;
      FQ_ASSIGN_OR_RETURN(const std::vector<float> weights, ReadWeights(planned));
      absl::StatusOr<LayerCurve> curve =
          layer_quantizer_.Measure(planned.name, weights, planned.n, planned.k);
      if (!curve.ok()) return Annotate(curve.status(), planned.source);
      curves.push_back(*std::move(curve));
    }
    if (calibration_ != nullptr) FQ_RETURN_IF_ERROR(calibration_->Restart());
    const std::vector<int64_t> records = ShareRecords(curves, budget);
    std::map<std::string, int64_t> by_layer;
    for (size_t i = 0; i < curves.size(); ++i) by_layer[curves[i].layer] = records[i];
    layer_quantizer_.SetRecords(std::move(by_layer));
    return absl::OkStatus();
  }

  absl::Status WriteTensor(const PlannedTensor& planned, const TensorInfo& source) {
    switch (planned.action) {
      case TensorAction::kInt4:
        break;  // MakeLayer, WriteLayer
      case TensorAction::kInt8:
        return WriteInt8(tensors_, source, planned, options_.num_threads, writer_);
      case TensorAction::kBFloat16:
        return WriteBFloat16(tensors_, source, planned, options_.num_threads, writer_);
      case TensorAction::kCopy:
        return WriteCopy(tensors_, source, planned, writer_);
    }
    return InternalError("unknown action");
  }

  void ReportDone(const PlannedTensor& planned) {
    int64_t count = 1;
    for (const int64_t dim : tensors_.Find(planned.source)->shape) count *= dim;
    done_weights_ += count;
    if (progress_) progress_(done_weights_, plan_.total_weights, planned.name);
  }

  // The layer's weights, and from now on in the background those of the next one.
  absl::StatusOr<std::vector<float>> TakeWeights(size_t index) {
    const StageClock clock(&report_.seconds.weights);
    FQ_RETURN_IF_ERROR(reading_.Wait());
    absl::StatusOr<std::vector<float>> weights =
        read_index_ == index ? std::move(read_ahead_) : ReadWeights(plan_.tensors[index]);
    FQ_RETURN_IF_ERROR(weights.status());
    const size_t next = index + 1;
    if (next < plan_.tensors.size() && plan_.tensors[next].action == TensorAction::kInt4) {
      read_index_ = next;
      reading_.Start([this, next] {
        read_ahead_ = ReadWeights(plan_.tensors[next]);
        return absl::OkStatus();
      });
    }
    return weights;
  }

  absl::StatusOr<std::unique_ptr<FinishedLayer>> MakeLayer(size_t index) {
    const PlannedTensor& planned = plan_.tensors[index];
    auto layer = std::make_unique<FinishedLayer>();
    layer->planned = &planned;
    FQ_ASSIGN_OR_RETURN(layer->weights, TakeWeights(index));
    FQ_RETURN_IF_ERROR(QuantizeLayer(layer.get()));
    if (options_.imported != nullptr && !layer_quantizer_.IsImported(planned.name)) {
      report_.notes.push_back(
          fmt::format("{}: quantized anew, {}", planned.name,
                      options_.imported->HasCodes(planned.name)
                          ? "the inputs of a group do not lie side by side (act-order)"
                          : "the GPTQ checkpoint has no codes for it"));
    } else if (calibration_ != nullptr && !layer_quantizer_.IsCalibrated(planned.name)) {
      report_.notes.push_back(
          fmt::format("{}: rounded to nearest, the calibration does not reach it", planned.name));
    }
    const Int4Weight& weight = layer->matrix.weight;
    if (weight.n_padded != planned.n || weight.k_padded != planned.k) {
      config_.true_shapes[planned.name] = {planned.n, planned.k};
    }
    return layer;
  }

  // In the background, while the next layer is quantized; nothing else uses the writer meanwhile.
  absl::Status WriteLayer(FinishedLayer* layer) {
    const PlannedTensor& planned = *layer->planned;
    const QuantizedMatrix& matrix = layer->matrix;
    if (layer->is_new) journal_.Store(planned.name, layer->weights, matrix);
    layer->weights = std::vector<float>();
    const int64_t bytes_before = writer_->tensor_bytes();
    int64_t stored_slots = 0;
    if (matrix.outliers.empty()) {
      FQ_RETURN_IF_ERROR(WriteQuantizedLinear(writer_, planned.name, matrix.weight, nullptr));
    } else {
      TileCooGeometry geometry = config_.geometry;
      geometry.k = planned.k;
      geometry.n = planned.n;
      FQ_ASSIGN_OR_RETURN(EncodedTileCoo encoded, EncodeTileCoo(geometry, matrix.outliers));
      FQ_ASSIGN_OR_RETURN(const TileCooMatrix outliers,
                          TileCooMatrix::Create(geometry, std::move(encoded.arrays)));
      stored_slots = outliers.num_slots();
      FQ_RETURN_IF_ERROR(WriteQuantizedLinear(writer_, planned.name, matrix.weight, &outliers));
    }
    layer->report = {planned.name,
                     planned.n,
                     planned.k,
                     stored_slots,
                     2 * planned.n * planned.k,
                     writer_->tensor_bytes() - bytes_before,
                     matrix.energy,
                     matrix.error_without,
                     matrix.error_with,
                     matrix.output_error,
                     matrix.output_energy};
    return absl::OkStatus();
  }

  // Waits for the layer that is being written, if there is one.
  absl::Status FinishWriting() {
    const StageClock clock(&report_.seconds.writing);
    const absl::Status status = writing_.Wait();
    const std::unique_ptr<FinishedLayer> layer = std::move(finished_);
    if (layer == nullptr) return status;
    if (!status.ok()) return Annotate(status, layer->planned->source);
    report_.layers.push_back(std::move(layer->report));
    ReportDone(*layer->planned);
    return absl::OkStatus();
  }

  // From the journal of a run that was killed, or new.
  absl::Status QuantizeLayer(FinishedLayer* layer) {
    const PlannedTensor& planned = *layer->planned;
    if (std::optional<QuantizedMatrix> found = journal_.Find(planned.name, layer->weights);
        found && found->weight.n == planned.n && found->weight.k == planned.k) {
      FQ_RETURN_IF_ERROR(layer_quantizer_.UseResult(planned.name, *found));
      ++report_.resumed_layers;
      layer->matrix = *std::move(found);
      return absl::OkStatus();
    }
    FQ_ASSIGN_OR_RETURN(layer->matrix, layer_quantizer_.Quantize(planned.name, layer->weights,
                                                                 planned.n, planned.k));
    layer->is_new = true;
    return absl::OkStatus();
  }

  // All that a layer's result depends on besides its own weights.
  std::string Fingerprint() const {
    const std::string imported =
        options_.imported == nullptr ? "" : FilesFingerprint(options_.imported->path());
    return fmt::format("flashquant layers 3 on {}\n{} {} {} {} {} {} {} {} {}\n{}\n{}\n{}\n{}",
                       ops_->name(), static_cast<int>(options_.method), plan_.group_size,
                       options_.symmetric, options_.density, options_.threshold, options_.damping,
                       options_.descent_sweeps, static_cast<int>(options_.rule),
                       options_.target_bytes,
                       calibration_ == nullptr ? "" : calibration_->fingerprint(),
                       FilesFingerprint(checkpoint_.path), imported, DumpJson(checkpoint_.config));
  }

  const Checkpoint& checkpoint_;
  const TensorSource& tensors_;
  const QuantizeOptions& options_;
  QuantizePlan plan_;
  CheckpointWriter* const writer_;
  const QuantizeProgress& progress_;
  Calibration* const calibration_;
  CpuQuantizerOps cpu_ops_;
  QuantizerOps* const ops_;
  QuantizationConfig config_;
  LayerQuantizer layer_quantizer_;
  LayerJournal journal_;
  QuantizeReport report_;
  int64_t done_weights_ = 0;
  // What the tasks below work on, which end before it.
  std::optional<size_t> read_index_;  // of read_ahead_
  absl::StatusOr<std::vector<float>> read_ahead_;
  std::unique_ptr<FinishedLayer> finished_;
  BackgroundTask reading_;
  BackgroundTask writing_;
};

}  // namespace

absl::StatusOr<QuantizeReport> QuantizeCheckpoint(const Checkpoint& checkpoint,
                                                  const std::string& output_dir,
                                                  const QuantizeOptions& options,
                                                  const QuantizeProgress& progress,
                                                  Calibration* calibration) {
  if (options.method != QuantizeMethod::kRtn && calibration == nullptr) {
    return InvalidArgumentError("--method: gptq and spqr need --calibration");
  }
  FQ_ASSIGN_OR_RETURN(const std::string output, OutputFolder(output_dir));
  FQ_ASSIGN_OR_RETURN(QuantizePlan plan, MakeQuantizePlan(checkpoint, options));
  FQ_ASSIGN_OR_RETURN(const std::string place, WritingPlace(output, options.overwrite));
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointWriter> writer,
                      CheckpointWriter::Create(place));
  CheckpointQuantizer quantizer(checkpoint, options, std::move(plan), writer.get(), progress,
                                calibration, output + kJournalSuffix);
  const auto write_all = [&]() -> absl::Status {
    FQ_RETURN_IF_ERROR(CopyModelFiles(checkpoint, writer.get()));
    FQ_RETURN_IF_ERROR(quantizer.WriteTensors());
    FQ_RETURN_IF_ERROR(
        writer->WriteTextFile(kReportFileName, DumpJson(ReportJson(quantizer.report())) + "\n"));
    FQ_RETURN_IF_ERROR(writer->Finish(quantizer.Config()));
    return place != output ? ReplaceFolder(place, output) : absl::OkStatus();
  };
  const absl::Status status = write_all();
  // A run that ends by itself, well or not, leaves nothing to take up.
  quantizer.RemoveJournal();
  FQ_RETURN_IF_ERROR(status);
  return quantizer.report();
}

}  // namespace flashquant
