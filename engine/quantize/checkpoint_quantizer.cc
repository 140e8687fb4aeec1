#include "engine/quantize/checkpoint_quantizer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/checkpoint/json.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "engine/quantize/density_budget.h"
#include "engine/quantize/int4_quantizer.h"
#include "engine/quantize/layer_journal.h"
#include "engine/quantize/layer_quantizer.h"
#include "engine/quantize/output_folder.h"
#include "engine/quantize/parallel_for.h"
#include "engine/quantize/table_quantizer.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo_encoder.h"

namespace flashquant {
namespace {

constexpr int64_t kPieceWeights = int64_t{1} << 20;

absl::Status CheckWeights(const std::string& name, std::span<const float> weights, int64_t k,
                          int num_threads) {
  std::atomic<int64_t> first_bad{INT64_MAX};
  const int64_t count = static_cast<int64_t>(weights.size());
  ParallelFor(num_threads, count, kPieceWeights, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (std::fabs(weights[static_cast<size_t>(i)]) <= kMaxWeightMagnitude) continue;
      int64_t before = first_bad.load();
      while (i < before && !first_bad.compare_exchange_weak(before, i)) {
      }
      return;
    }
  });
  const int64_t bad = first_bad.load();
  if (bad == INT64_MAX) return absl::OkStatus();
  return DataLossError("tensor {}: weight at row {}, column {} is not finite or above {} (got {})",
                       name, bad / k, bad % k, kMaxWeightMagnitude,
                       weights[static_cast<size_t>(bad)]);
}

template <typename Element>
std::span<const uint8_t> AsBytes(const std::vector<Element>& elements) {
  return {reinterpret_cast<const uint8_t*>(elements.data()), elements.size() * sizeof(Element)};
}

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
        layer_quantizer_(options, plan_.group_size, config_.geometry.tile_k,
                         options.imported != AsGptq(*checkpoint.tensors), calibration),
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
    int64_t done = 0;
    if (progress_) progress_(0, plan_.total_weights, "");
    if (options_.target_bytes > 0) FQ_RETURN_IF_ERROR(ChooseRecords());
    for (const PlannedTensor& planned : plan_.tensors) {
      const TensorInfo& source = *tensors_.Find(planned.source);
      const absl::Status status = WriteTensor(planned, source);
      if (!status.ok()) return Annotate(status, planned.source);
      if (planned.action == TensorAction::kCopy) continue;
      int64_t count = 1;
      for (const int64_t dim : source.shape) count *= dim;
      done += count;
      if (progress_) progress_(done, plan_.total_weights, planned.name);
    }
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
  void RemoveJournal() { journal_.Remove(); }

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
        return WriteInt4(planned);
      case TensorAction::kInt8:
        return WriteInt8(planned, source);
      case TensorAction::kBFloat16:
        return WriteBFloat16(planned, source);
      case TensorAction::kCopy:
        return WriteCopy(planned, source);
    }
    return InternalError("unknown action");
  }

  absl::Status WriteInt4(const PlannedTensor& planned) {
    FQ_ASSIGN_OR_RETURN(std::vector<float> weights, ReadWeights(planned));
    FQ_ASSIGN_OR_RETURN(const QuantizedMatrix matrix, QuantizeLayer(planned, weights));
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
    weights = {};

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
    if (matrix.weight.n_padded != planned.n || matrix.weight.k_padded != planned.k) {
      config_.true_shapes[planned.name] = {planned.n, planned.k};
    }
    report_.layers.push_back({planned.name, planned.n, planned.k, stored_slots,
                              2 * planned.n * planned.k, writer_->tensor_bytes() - bytes_before,
                              matrix.energy, matrix.error_without, matrix.error_with,
                              matrix.output_error, matrix.output_energy});
    return absl::OkStatus();
  }

  // From the journal of a run that was killed, or new.
  absl::StatusOr<QuantizedMatrix> QuantizeLayer(const PlannedTensor& planned,
                                                const std::vector<float>& weights) {
    if (std::optional<QuantizedMatrix> found = journal_.Find(planned.name, weights);
        found && found->weight.n == planned.n && found->weight.k == planned.k) {
      FQ_RETURN_IF_ERROR(layer_quantizer_.UseResult(planned.name, *found));
      ++report_.resumed_layers;
      return *std::move(found);
    }
    FQ_ASSIGN_OR_RETURN(QuantizedMatrix matrix,
                        layer_quantizer_.Quantize(planned.name, weights, planned.n, planned.k));
    journal_.Store(planned.name, weights, matrix);
    return matrix;
  }

  // All that a layer's result depends on besides its own weights.
  std::string Fingerprint() const {
    const std::string imported =
        options_.imported == nullptr ? "" : FilesFingerprint(options_.imported->path());
    return fmt::format("flashquant layers 2\n{} {} {} {} {} {} {} {} {}\n{}\n{}\n{}\n{}",
                       static_cast<int>(options_.method), plan_.group_size, options_.symmetric,
                       options_.density, options_.threshold, options_.damping,
                       options_.descent_sweeps, static_cast<int>(options_.rule),
                       options_.target_bytes,
                       calibration_ == nullptr ? "" : calibration_->fingerprint(),
                       FilesFingerprint(checkpoint_.path), imported, DumpJson(checkpoint_.config));
  }

  absl::Status WriteInt8(const PlannedTensor& planned, const TensorInfo& source) {
    const int64_t rows_per_piece = std::max<int64_t>(1, kPieceWeights / planned.k);
    std::vector<int8_t> codes(static_cast<size_t>(planned.n * planned.k));
    std::vector<BFloat16> scales(static_cast<size_t>(planned.n));
    std::vector<float> piece;
    for (int64_t row = 0; row < planned.n; row += rows_per_piece) {
      const int64_t count = std::min(rows_per_piece, planned.n - row);
      piece.resize(static_cast<size_t>(count * planned.k));
      FQ_RETURN_IF_ERROR(tensors_.ReadRowsAsFloat(source, row, count, piece.data()));
      FQ_RETURN_IF_ERROR(CheckWeights(planned.source, piece, planned.k, options_.num_threads));
      ParallelFor(options_.num_threads, count, 64, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const size_t k = static_cast<size_t>(planned.k);
          scales[static_cast<size_t>(row + i)] = QuantizeTableRow(
              std::span<const float>(piece).subspan(static_cast<size_t>(i) * k, k),
              std::span<int8_t>(codes).subspan(static_cast<size_t>(row + i) * k, k));
        }
      });
    }
    return WriteInt8Table(writer_, planned.name, planned.n, planned.k, codes, scales);
  }

  absl::Status WriteBFloat16(const PlannedTensor& planned, const TensorInfo& source) {
    FQ_RETURN_IF_ERROR(writer_->BeginTensor(planned.name, DType::kBF16, source.shape));
    const int64_t rows = source.num_rows();
    int64_t per_row = 1;
    for (size_t i = 1; i < source.shape.size(); ++i) per_row *= source.shape[i];
    const int64_t rows_per_piece = std::max<int64_t>(1, kPieceWeights / per_row);
    std::vector<float> piece;
    std::vector<BFloat16> converted;
    for (int64_t row = 0; row < rows; row += rows_per_piece) {
      const int64_t count = std::min(rows_per_piece, rows - row);
      piece.resize(static_cast<size_t>(count * per_row));
      converted.resize(piece.size());
      FQ_RETURN_IF_ERROR(tensors_.ReadRowsAsFloat(source, row, count, piece.data()));
      FQ_RETURN_IF_ERROR(CheckWeights(planned.source, piece, per_row, options_.num_threads));
      std::transform(piece.begin(), piece.end(), converted.begin(),
                     [](float weight) { return ToBFloat16(weight); });
      FQ_RETURN_IF_ERROR(writer_->AppendBytes(AsBytes(converted)));
    }
    return absl::OkStatus();
  }

  absl::Status WriteCopy(const PlannedTensor& planned, const TensorInfo& source) {
    FQ_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, tensors_.ReadBytes(planned.source));
    return writer_->AddTensor(planned.name, source.dtype, source.shape, bytes);
  }

  const Checkpoint& checkpoint_;
  const TensorSource& tensors_;
  const QuantizeOptions& options_;
  QuantizePlan plan_;
  CheckpointWriter* const writer_;
  const QuantizeProgress& progress_;
  Calibration* const calibration_;
  QuantizationConfig config_;
  LayerQuantizer layer_quantizer_;
  LayerJournal journal_;
  QuantizeReport report_;
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
