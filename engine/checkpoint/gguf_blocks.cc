#include "engine/checkpoint/gguf_blocks.h"

#include <array>
#include <cmath>
#include <cstddef>

#include "kernels/base/bfloat16.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr size_t kSmallBlock = 32;
constexpr size_t kSuperBlock = 256;

float LoadHalf(const uint8_t* bytes) {
  return ToFloat(Half{static_cast<uint16_t>(bytes[0] | bytes[1] << 8)});
}

absl::Status CheckFinite(float value) {
  if (std::isfinite(value)) return absl::OkStatus();
  return DataLossError("block scale is not finite");
}

absl::Status DequantizeQ8(const uint8_t* block, float* out) {
  const float d = LoadHalf(block);
  for (size_t i = 0; i < kSmallBlock; ++i) {
    out[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  }
  return CheckFinite(d);
}

absl::Status DequantizeQ4(const uint8_t* nibbles, float d, float offset, float m, float* out) {
  for (size_t i = 0; i < kSmallBlock / 2; ++i) {
    out[i] = d * (static_cast<float>(nibbles[i] & 0x0f) - offset) + m;
    out[i + kSmallBlock / 2] = d * (static_cast<float>(nibbles[i] >> 4) - offset) + m;
  }
  FQ_RETURN_IF_ERROR(CheckFinite(d));
  return CheckFinite(m);
}

absl::Status DequantizeQ6(const uint8_t* block, float* out) {
  const float d = LoadHalf(block + 208);
  for (size_t half = 0; half < 2; ++half) {
    const uint8_t* const low = block + 64 * half;
    const uint8_t* const high = block + 128 + 32 * half;
    const uint8_t* const scales = block + 192 + 8 * half;
    for (size_t a = 0; a < 4; ++a) {
      for (size_t l = 0; l < 32; ++l) {
        const uint8_t packed = low[l + 32 * (a % 2)];
        const int low_bits = a < 2 ? packed & 0x0f : packed >> 4;
        const int high_bits = high[l] >> (2 * a) & 0x03;
        const auto scale = static_cast<float>(static_cast<int8_t>(scales[2 * a + l / 16]));
        *out++ = d * scale * static_cast<float>((low_bits | high_bits << 4) - 32);
      }
    }
  }
  return CheckFinite(d);
}

absl::Status DequantizeBlock(GgufType type, const uint8_t* block, float* out) {
  switch (type) {
    case GgufType::kQ8_0:
      return DequantizeQ8(block, out);
    case GgufType::kQ4_0:
      return DequantizeQ4(block + 2, LoadHalf(block), 8, 0, out);
    case GgufType::kQ4_1:
      return DequantizeQ4(block + 4, LoadHalf(block), 0, LoadHalf(block + 2), out);
    case GgufType::kQ6K:
      return DequantizeQ6(block, out);
    default:
      return InternalError("{} is no block type", GgufTypeName(static_cast<uint32_t>(type)));
  }
}

}  // namespace

std::optional<GgufBlock> GgufBlockOf(GgufType type) {
  switch (type) {
    case GgufType::kF32:
      return GgufBlock{1, 4};
    case GgufType::kF16:
    case GgufType::kBF16:
      return GgufBlock{1, 2};
    case GgufType::kQ4_0:
      return GgufBlock{kSmallBlock, 18};
    case GgufType::kQ4_1:
      return GgufBlock{kSmallBlock, 20};
    case GgufType::kQ8_0:
      return GgufBlock{kSmallBlock, 34};
    case GgufType::kQ6K:
      return GgufBlock{kSuperBlock, 210};
  }
  return std::nullopt;
}

const char* GgufTypeName(uint32_t type) {
  static constexpr std::array<const char*, 31> kNames = {
      "F32",     "F16",    "Q4_0",    "Q4_1",  "type 4", "type 5", "Q5_0",  "Q5_1",
      "Q8_0",    "Q8_1",   "Q2_K",    "Q3_K",  "Q4_K",   "Q5_K",   "Q6_K",  "Q8_K",
      "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",  "IQ2_S", "IQ4_XS",
      "I8",      "I16",    "I32",     "I64",   "F64",    "IQ1_M",  "BF16"};
  return type < kNames.size() ? kNames[type] : "an unknown type";
}

absl::Status DequantizeGgufBlocks(GgufType type, std::span<const uint8_t> blocks, float* out) {
  const std::optional<GgufBlock> block = GgufBlockOf(type);
  if (!block.has_value() || block->num_weights == 1 ||
      blocks.size() % static_cast<size_t>(block->num_bytes) != 0) {
    return InternalError("{} bytes are no blocks of {}", blocks.size(),
                         GgufTypeName(static_cast<uint32_t>(type)));
  }
  for (size_t offset = 0; offset < blocks.size(); offset += static_cast<size_t>(block->num_bytes)) {
    FQ_RETURN_IF_ERROR(DequantizeBlock(type, blocks.data() + offset, out));
    out += block->num_weights;
  }
  return absl::OkStatus();
}

}  // namespace flashquant
