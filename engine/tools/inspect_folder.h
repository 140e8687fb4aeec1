// What `flashquant inspect` prints of a checkpoint folder: a table of its quantized layers and one
// of its other tensors, to stdout, both in the order in which people count ("layers.2" before
// "layers.10").
#pragma once

#include <string>

#include "absl/status/status.h"

namespace flashquant {

// Reads headers, shapes and the outlier index; with `verify` every byte, and prints each checksum
// or rule of the format that does not hold. Statuses of OpenCheckpoint; DATA_LOSS for problems
// found.
absl::Status InspectFolder(const std::string& path, bool verify);

}  // namespace flashquant
