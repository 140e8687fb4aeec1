#include "kernels/cuda/backend/unpack_tables.h"

#include "kernels/base/check.h"
#include "kernels/cuda/linear_w4a16/pack_rules.h"

namespace flashquant::cuda {

UnpackTables MakeUnpackTables() {
  UnpackTables tables;
  for (uint32_t channel = 0; channel < kStripN; ++channel) {
    for (uint32_t feature = 0; feature < kUnitK; ++feature) {
      const uint16_t position = SlotPosition(feature, channel);
      FQ_CHECK(position < kSlotPositions);
      tables.slot_place[position] = static_cast<uint16_t>(channel << kSlotPlaceBits | feature);
    }
  }
  return tables;
}

}  // namespace flashquant::cuda
