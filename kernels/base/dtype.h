// Element types of tensors, in files and in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace flashquant {

enum class DType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF64,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kBool,
  kF8E4M3  // of a KV cache only
};

// Bytes of one element.
int64_t DTypeBytes(DType dtype);

// The safetensors name: "F32", "BF16", "U8", ...
std::string_view DTypeName(DType dtype);

// nullopt for a name that we do not know, or whose tensors we do not read: FP8 weights.
std::optional<DType> DTypeFromName(std::string_view name);

}  // namespace flashquant
