// TileCooMatrix: the only way from arrays to a matrix is through the validator.
#include "kernels/format/tile_coo.h"

#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo_validate.h"

namespace flashquant {

absl::StatusOr<TileCooMatrix> TileCooMatrix::Create(const TileCooGeometry& geometry,
                                                    TileCooArrays arrays) {
  FQ_RETURN_IF_ERROR(ValidateTileCoo(geometry, arrays));
  return TileCooMatrix(geometry, std::move(arrays));
}

double TileCooMatrix::stored_density() const {
  return static_cast<double>(num_slots()) /
         (static_cast<double>(geometry_.k) * static_cast<double>(geometry_.n));
}

}  // namespace flashquant
