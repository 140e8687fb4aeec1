// What the CUDA backend's memory will be used for, from sizes alone: for planning a model for a
// card that need not be there. In every build.
#pragma once

#include <cstdint>
#include <span>

namespace flashquant {

// A LinearPart before it is read.
struct PlannedPart {
  int64_t n = 0;
  int64_t k = 0;
  bool int4 = false;         // else dense, held in BF16 whatever the file has
  int64_t group_size = 128;  // weights along K per scale; k for one group per row
  bool symmetric = false;
  int64_t outlier_records = 0;  // of four slots
  bool has_bias = false;
};

// Bytes that PackLinear of these parts takes. INT4: the fused kernel's form, whose outliers are
// counted as stored, null slots included, and their padding as it is in the mean: within 1% below
// and 2% above.
int64_t PlannedWeightBytes(std::span<const PlannedPart> parts);

// What the backend holds besides weights and the caller's buffers: what the driver takes for its
// kernels (the CUDA context apart), cuBLAS' workspace, partial sums,
// the BF16 copy that the largest INT4 layer, or as much of it as is unpacked at once, takes for
// prefill (`largest_int4_weights`: its N * K, the head's apart), and the products of an INT4 head
// (`int4_head_columns`; 0: not INT4).
int64_t PlannedScratchBytes(int64_t largest_int4_weights, int64_t int4_head_columns,
                            int32_t max_sequences);
// Recorded decode steps of up to max_sequences rows.
int64_t PlannedRecordingBytes(int32_t num_layers, int32_t max_sequences, int32_t row_multiple);

}  // namespace flashquant
