// Element types: names as safetensors spells them, and sizes of the C++ types that hold them.
#include "kernels/base/dtype.h"

#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/float8.h"
#include "kernels/base/tensor_view.h"

namespace flashquant {
namespace {

const std::vector<std::tuple<DType, const char*, size_t>>& AllTypes() {
  static const auto* const kTypes = new std::vector<std::tuple<DType, const char*, size_t>>{
      {DType::kF32, "F32", sizeof(float)},
      {DType::kF16, "F16", sizeof(Half)},
      {DType::kBF16, "BF16", sizeof(BFloat16)},
      {DType::kF64, "F64", sizeof(double)},
      {DType::kU8, "U8", 1},
      {DType::kI8, "I8", 1},
      {DType::kU16, "U16", 2},
      {DType::kI16, "I16", 2},
      {DType::kU32, "U32", 4},
      {DType::kI32, "I32", 4},
      {DType::kU64, "U64", 8},
      {DType::kI64, "I64", 8},
      {DType::kBool, "BOOL", sizeof(bool)}};
  return *kTypes;
}

TEST(DTypeTest, NamesAndSizesAreThoseOfSafetensors) {
  for (const auto& [dtype, name, num_bytes] : AllTypes()) {
    EXPECT_EQ(DTypeName(dtype), name);
    EXPECT_EQ(DTypeBytes(dtype), static_cast<int64_t>(num_bytes)) << name;
    EXPECT_EQ(DTypeFromName(name), dtype) << name;
  }
  EXPECT_EQ(DTypeName(DType::kF8E4M3), "F8_E4M3");
  EXPECT_EQ(DTypeBytes(DType::kF8E4M3), static_cast<int64_t>(sizeof(Float8E4M3)));
}

// F8_E4M3: files of FP8 weights, which need scales, are refused.
TEST(DTypeTest, UnknownNamesHaveNoType) {
  for (const char* name : {"", "f32", "F32 ", "FLOAT", "F8_E4M3", "BF1"}) {
    EXPECT_EQ(DTypeFromName(name), std::nullopt) << name;
  }
}

TEST(TensorViewTest, NumElementsIsTheProductOfTheShape) {
  EXPECT_EQ((TensorView{nullptr, DType::kF32, {3, 4, 5}}).NumElements(), 60);
  EXPECT_EQ((TensorView{nullptr, DType::kF32, {3, 0}}).NumElements(), 0);
  EXPECT_EQ((TensorView{nullptr, DType::kF32, {}}).NumElements(), 1);
}

}  // namespace
}  // namespace flashquant
