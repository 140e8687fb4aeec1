#include "kernels/base/dtype.h"

#include <array>
#include <cstddef>

namespace flashquant {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  int64_t num_bytes;
};

constexpr std::array<DTypeInfo, 14> kDTypes = {{
    {DType::kF32, "F32", 4},
    {DType::kF16, "F16", 2},
    {DType::kBF16, "BF16", 2},
    {DType::kF64, "F64", 8},
    {DType::kU8, "U8", 1},
    {DType::kI8, "I8", 1},
    {DType::kU16, "U16", 2},
    {DType::kI16, "I16", 2},
    {DType::kU32, "U32", 4},
    {DType::kI32, "I32", 4},
    {DType::kU64, "U64", 8},
    {DType::kI64, "I64", 8},
    {DType::kBool, "BOOL", 1},
    {DType::kF8E4M3, "F8_E4M3", 1},
}};

}  // namespace

int64_t DTypeBytes(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].num_bytes; }

std::string_view DTypeName(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }

std::optional<DType> DTypeFromName(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name && info.dtype != DType::kF8E4M3) return info.dtype;
  }
  return std::nullopt;
}

}  // namespace flashquant
