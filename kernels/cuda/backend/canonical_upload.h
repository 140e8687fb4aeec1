// The canonical arrays of an INT4 layer's parts as one layer in device memory, for the device
// packer.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/linear_w4a16/pack.h"

namespace flashquant::cuda {

// Whether the parts, all INT4, follow one another in the joined layer's arrays as they are: equal
// groups, zero points and tiles, and each part but the last ends where a tile of outliers and a
// strip do.
bool IsCanonicallyJoinable(std::span<const LinearPart> parts);

// Pointers into `staging`, or with `staging` null only the sizes: what the arrays need.
struct CanonicalLayer {
  Int4Arrays weight;
  TileCooPointers outliers;  // none when no part has any
  int64_t num_bytes = 0;
};
CanonicalLayer PlaceCanonicalLayer(std::span<const LinearPart> parts, uint8_t* staging);

// Copies the parts to where `layer`'s pointers are. `host` arrays may change when it returns.
absl::Status UploadCanonicalLayer(std::span<const LinearPart> parts, const CanonicalLayer& layer,
                                  Backend* backend);

}  // namespace flashquant::cuda
