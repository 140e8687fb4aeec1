// See slot_order.h.
#include "kernels/bench/slot_order.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace flashquant::bench {
namespace {

struct Slot {
  uint16_t position = 0;
  uint16_t value = 0;
};

// A piece without its trailer; the null slots at its end stay.
void OrderPiece(uint8_t* piece, int num_quads) {
  std::vector<Slot> slots;
  const auto at = [&](size_t i) {
    return piece + i / cuda::kSlotsPerQuad * cuda::kQuadBytes + i % cuda::kSlotsPerQuad * 2;
  };
  for (size_t i = 0; i < static_cast<size_t>(num_quads) * cuda::kSlotsPerQuad; ++i) {
    Slot slot;
    std::memcpy(&slot.position, at(i), 2);
    std::memcpy(&slot.value, at(i) + 8, 2);
    if (slot.value != 0) slots.push_back(slot);
  }
  // The block is the position's highest part, so block 0 stays first.
  std::stable_sort(slots.begin(), slots.end(),
                   [](const Slot& a, const Slot& b) { return a.position < b.position; });
  for (size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(at(i), &slots[i].position, 2);
    std::memcpy(at(i) + 8, &slots[i].value, 2);
  }
}

}  // namespace

void OrderSlotsByPosition(cuda::PackedLinear& packed) {
  const cuda::PackedLayout& layout = packed.layout;
  const int64_t num_units = int64_t{layout.num_strips} * layout.num_units;
  for (int64_t unit = 0; unit < num_units; ++unit) {
    cuda::OutlierRef ref;
    std::memcpy(&ref, packed.bytes.data() + layout.index_offset + unit * int64_t{sizeof(ref)},
                sizeof(ref));
    uint8_t* record = packed.bytes.data() + layout.outliers_offset + int64_t{ref.offset} * 16;
    for (int64_t left = int64_t{ref.num_16bytes} * 16; left > 0; left -= cuda::kMaxPieceBytes) {
      const int64_t bytes = std::min<int64_t>(left, cuda::kMaxPieceBytes);
      OrderPiece(record, static_cast<int>(bytes / cuda::kQuadBytes) - 1);
      record += bytes;
    }
  }
}

}  // namespace flashquant::bench
