#include "kernels/cuda/backend/unpack_tables.h"

#include <vector>

#include "kernels/base/check.h"
#include "kernels/cuda/linear_w4a16/pack_rules.h"

namespace flashquant::cuda {

UnpackTables MakeUnpackTables() {
  UnpackTables tables;
  const std::vector<uint8_t> codes(kStripN * kChunkK / 2);  // all 0
  const Int4Arrays zeros = {.n = kStripN,
                            .k = kChunkK,
                            .n_padded = kStripN,
                            .k_padded = kChunkK,
                            .group_size = kChunkK,
                            .qweight = codes.data()};
  tables.code_flip = CodeWord(zeros, 0, 0, 0);
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
