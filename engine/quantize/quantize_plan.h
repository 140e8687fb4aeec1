// Decides, before a byte is written, what becomes of every tensor of a checkpoint.
//
// Only names, shapes and config.json are looked at. Which tensors are linear layers is told from
// their names and shapes, not from the architecture, so that any decoder with `....layers.N....`
// names can be quantized.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/gptq_reader.h"
#include "engine/quantize/outlier_selector.h"
#include "kernels/quantizer_ops.h"

namespace flashquant {

enum class TableFormat : uint8_t { kBFloat16, kInt8, kInt4 };
std::string_view TableFormatName(TableFormat format);

// kGptq needs calibration (calibration.h).
enum class QuantizeMethod : uint8_t { kRtn, kGptq };

struct QuantizeOptions {
  QuantizeMethod method = QuantizeMethod::kRtn;
  std::optional<int64_t> group_size;  // 32, 64, 128, -1 (one group per row); nullopt = auto
  bool symmetric = false;
  double density = 0.01;
  // Above 0, in place of the density: outliers are records whose weights cost on average more than
  // this times what replacing a weight of the layer by its column's mean costs (SpQR's threshold).
  double threshold = 0;
  // Above 0, in place of the density: outliers of all layers together, each with as many as lower
  // the sum of the layers' relative errors most, so that all tensors take at most so many bytes.
  int64_t target_bytes = 0;
  double damping = 0.01;                           // kGptq: of the mean of the Hessian's diagonal
  int descent_sweeps = 4;                          // kGptq: gptq_quantizer.h
  TableFormat embedding = TableFormat::kBFloat16;  // not kInt4
  // nullopt: as the embedding when the head is tied to it, else BF16.
  std::optional<TableFormat> lm_head;
  OutlierRule rule = OutlierRule::kErrorWithRescale;
  int num_threads = 1;
  bool overwrite = false;
  // Layers whose codes are taken over where their groups are contiguous (gptq_import.h), whatever
  // the method; the group size is the codes'. The checkpoint that is quantized is either these, or
  // (for outliers) what they were made of. Outlives the run.
  const GptqTensors* imported = nullptr;
  // Where the heavy steps of layers without calibration run; null: on the CPU. Outlives the run.
  QuantizerOps* ops = nullptr;
};

inline constexpr double kMaxThreshold = 100;

enum class TensorAction : uint8_t {
  kInt4,      // linear layer or head: codes, scales, zero points, outliers
  kInt8,      // table: one scale per row
  kBFloat16,  // converted where it is something else
  kCopy       // bytes as they are
};

struct PlannedTensor {
  std::string source;  // tensor in the input
  std::string name;    // of the output tensor, or of the layer (without ".weight") for kInt4
  TensorAction action = TensorAction::kCopy;
  int64_t n = 0;  // rows and columns of kInt4 and kInt8
  int64_t k = 0;
};

struct QuantizePlan {
  int64_t group_size = 128;  // -1: one group per row
  std::vector<PlannedTensor> tensors;
  std::vector<std::string> notes;  // what the user should know: padded, kept in BF16, dropped
  TableFormat embedding = TableFormat::kBFloat16;
  TableFormat lm_head = TableFormat::kBFloat16;
  bool tied_head = false;     // the output has no lm_head of its own
  int64_t total_weights = 0;  // of kInt4, kInt8 and kBFloat16, for progress
};

// INVALID_ARGUMENT for bad options; UNIMPLEMENTED when the input is quantized already; DATA_LOSS
// when it has no linear layer or no embedding.
absl::StatusOr<QuantizePlan> MakeQuantizePlan(const Checkpoint& checkpoint,
                                              const QuantizeOptions& options);

// K and N rounded up to what INT4 codes need.
int64_t PaddedK(int64_t k, int64_t group_size);
int64_t PaddedN(int64_t n);

}  // namespace flashquant
