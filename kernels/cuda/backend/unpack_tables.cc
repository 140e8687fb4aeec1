#include "kernels/cuda/backend/unpack_tables.h"

#include <vector>

#include "kernels/base/check.h"
#include "kernels/cuda/linear_w4a16/pack_rules.h"

namespace flashquant::cuda {
namespace {

constexpr int kDigitBits = 4;
constexpr int kDigits = 3;  // 32 channels x 128 features are numbered in 12 bits
static_assert(kStripN * kChunkK == 1 << (kDigitBits * kDigits));

// One strip's chunk whose codes are a digit of their own place's number.
class ProbeWeight {
 public:
  ProbeWeight() : codes_(kStripN * kChunkK / 2), scales_(kStripN) {
    for (int channel = 0; channel < kStripN; ++channel) {
      scales_[static_cast<size_t>(channel)] = static_cast<uint16_t>(channel);
    }
  }
  // `digit` of each number; -1: all codes 0.
  void SetCodes(int digit) {
    for (size_t i = 0; i < codes_.size(); ++i) {
      const auto low = digit < 0 ? 0 : 2 * i >> (kDigitBits * digit) & 0xf;
      const auto high = digit < 0 ? 0 : (2 * i + 1) >> (kDigitBits * digit) & 0xf;
      codes_[i] = static_cast<uint8_t>(low | high << 4);
    }
  }
  Int4Arrays arrays() const {
    return {.n = kStripN,
            .k = kChunkK,
            .n_padded = kStripN,
            .k_padded = kChunkK,
            .group_size = kChunkK,
            .qweight = codes_.data(),
            .scales = scales_.data()};
  }

 private:
  std::vector<uint8_t> codes_;
  std::vector<uint16_t> scales_;
};

}  // namespace

UnpackTables MakeUnpackTables() {
  UnpackTables tables;
  ProbeWeight probe;
  probe.SetCodes(-1);
  tables.code_flip = CodeWord(probe.arrays(), 0, 0, 0);
  for (int digit = 0; digit < kDigits; ++digit) {
    probe.SetCodes(digit);
    for (int word = 0; word < kUnpackWords; ++word) {
      const uint32_t codes = CodeWord(probe.arrays(), 0, 0, word) ^ tables.code_flip;
      for (int nibble = 0; nibble < 8; ++nibble) {
        const uint32_t value = codes >> (4 * nibble) & 0xf;
        tables.code_place[word][nibble] |= static_cast<uint16_t>(value << (kDigitBits * digit));
      }
    }
  }
  const PackedLayout layout = DenseLayout(probe.arrays());
  for (int entry = 0; entry < kStripN; ++entry) {
    const uint16_t channel = ScaleEntry(probe.arrays(), layout, 0, 0, entry);
    FQ_CHECK(channel < kStripN);
    tables.scale_entry[channel] = static_cast<uint16_t>(entry);
  }
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
