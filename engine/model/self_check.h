// Before a model answers anything: every kind of layer that it has is run once on its backend and
// compared with the host. A card, driver or build that computes wrongly is found out at the start,
// with the name of the layer.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/model/decoder_model.h"
#include "kernels/backend.h"

namespace flashquant {

// Linear layers, one of each shape and storage, with as many rows as decode steps of up to max_rows
// have and with a prompt's: a sample of their outputs against sums in double precision over the
// checkpoint's own values; the embedding likewise. Norms, rotary positions with attention (prompt
// and decode), activation and greedy sampling of the model's sizes against the CPU backend.
// INTERNAL "self-check: ‹layer›: ..." for a relative error above what rounding to BF16 explains;
// errors of reading.
absl::Status CheckLayers(const Checkpoint& checkpoint, const DecoderModel& model, int32_t max_rows,
                         Backend* backend);

// Its second part: all but linear layers and the embedding.
absl::Status CheckOps(const ModelConfig& config, Backend* backend);

}  // namespace flashquant
