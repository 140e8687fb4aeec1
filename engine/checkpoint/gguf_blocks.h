// Element types of GGUF tensors that can be imported, and turning their blocks into floats. The
// layouts are stated here; the container is gguf_file.h.
//
// Source: the public definitions of the ggml block types. d and m are FP16, all little-endian.
//   Q8_0: 32 weights, 34 bytes: d, 32 signed bytes q;              w = d q
//   Q4_0: 32 weights, 18 bytes: d, 16 bytes of nibbles;            w = d (q - 8)
//   Q4_1: 32 weights, 20 bytes: d, m, 16 bytes of nibbles;         w = d q + m
//         byte j holds weight j (low nibble) and weight j + 16 (high nibble)
//   Q6_K: 256 weights, 210 bytes: ql[128], qh[64], 16 signed scales s, d; w = d s (q - 32);
//         in each half of 128, weight 32 a + l (a = 0..3, l = 0..31) has its low four bits in
//         ql[l + 32 (a % 2)], low nibble for a < 2, its high two bits in bits 2 a of qh[l], and the
//         scale s[2 a + l / 16]
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/status.h"

namespace flashquant {

// Numbers as in the file.
enum class GgufType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ8_0 = 8,
  kQ6K = 14,
  kBF16 = 30,
};

struct GgufBlock {
  int64_t num_weights = 0;
  int64_t num_bytes = 0;
};

// nullopt for a type that is not imported.
std::optional<GgufBlock> GgufBlockOf(GgufType type);

// "Q4_K" for any type of the specification, for messages.
const char* GgufTypeName(uint32_t type);

// Writes the weights of whole blocks to `out`. `type` is a block type, not F32, F16 or BF16.
// DATA_LOSS when a block's d or m is not finite.
absl::Status DequantizeGgufBlocks(GgufType type, std::span<const uint8_t> blocks, float* out);

}  // namespace flashquant
