// The CPU backend's memory, its refusals, and the factory's options.
#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend_factory.h"
#include "kernels/format/tile_coo_encoder.h"
#include "tests/support/random_weights.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

std::unique_ptr<Backend> MakeCpuBackend() {
  BackendOptions options;
  options.kind = "cpu";
  auto backend = CreateBackend(options);
  EXPECT_TRUE(backend.ok());
  return *std::move(backend);
}

TEST(BackendFactoryTest, OptionsAreCheckedAndHonoured) {
  BackendOptions options;
  options.kind = "tpu";
  EXPECT_THAT(CreateBackend(options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("'tpu'")));
  options.kind = "cpu";
  options.num_threads = -1;
  EXPECT_THAT(CreateBackend(options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("threads: -1")));
  options.num_threads = 3;
  options.row_multiple = 1000;
  EXPECT_THAT(CreateBackend(options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row multiple: 1000")));
  options.row_multiple = 8;
  options.kv_cache_dtype = "int8";
  EXPECT_THAT(CreateBackend(options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("KV cache dtype 'int8'; auto, bf16 or fp8")));
  options.kv_cache_dtype = "auto";
  auto backend = CreateBackend(options);
  FQ_ASSERT_OK(backend);
  EXPECT_EQ((*backend)->info().kv_dtype, DType::kF32);
  const BackendInfo info = (*backend)->info();
  EXPECT_EQ(info.name, "cpu");
  EXPECT_THAT(info.device, HasSubstr("3 threads"));
  EXPECT_EQ(info.row_multiple, 8);
  EXPECT_GT(info.free_memory_bytes, 0);
}

TEST(BackendFactoryTest, TheTypeOfTheKvCacheIsTheOneAskedFor) {
  for (const auto& [name, dtype] :
       {std::pair{"bf16", DType::kBF16}, std::pair{"fp8", DType::kF8E4M3}}) {
    auto backend = CreateBackend({.kind = "cpu", .kv_cache_dtype = name});
    FQ_ASSERT_OK(backend);
    EXPECT_EQ((*backend)->info().kv_dtype, dtype);
  }
}

TEST(CpuBackendTest, MemoryIsAlignedAndZero) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend();
  for (const int64_t num_bytes : {1, 255, 257, 4096, 5 << 20}) {
    auto buffer = backend->Allocate(num_bytes);
    FQ_ASSERT_OK(buffer);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 256, 0u);
    EXPECT_EQ(buffer->num_bytes(), num_bytes);
    for (int64_t i = 0; i < num_bytes; i += 251) ASSERT_EQ(buffer->As<uint8_t>()[i], 0);
  }
  auto nothing = backend->Allocate(0);
  FQ_ASSERT_OK(nothing);
  EXPECT_EQ(nothing->num_bytes(), 0);
}

TEST(CpuBackendTest, MoreMemoryThanThereIsIsRefused) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend();
  const int64_t too_much = backend->info().free_memory_bytes * 2;
  EXPECT_THAT(backend->Allocate(too_much),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("host memory")));
  EXPECT_THAT(backend->Allocate(int64_t{1} << 62),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("host memory")));
}

TEST(CpuBackendTest, PackLinearRefusesPartsThatDoNotFit) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend();
  RandomLinearOptions options;
  options.n = 16;
  options.k = 64;
  options.group_size = 32;
  options.density = 0.1;
  const RandomLinear a(options);
  options.k = 128;
  const RandomLinear b(options);
  const std::vector<LinearPart> different_k = {a.part(), b.part()};
  EXPECT_THAT(backend->PackLinear(different_k),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("K 64 and 128")));
  EXPECT_THAT(backend->PackLinear({}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no parts")));

  LinearPart foreign = a.part();
  foreign.outliers = b.part().outliers;
  EXPECT_THAT(backend->PackLinear({&foreign, 1}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("outliers are 128 x 16")));

  LinearPart unscaled;
  const std::vector<int8_t> codes(12);
  unscaled.dense = {codes.data(), DType::kI8, {3, 4}};
  EXPECT_THAT(backend->PackLinear({&unscaled, 1}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row scales")));
  unscaled.dense = {codes.data(), DType::kU8, {3, 4}};
  EXPECT_THAT(backend->PackLinear({&unscaled, 1}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dtype U8")));
  unscaled.dense = {codes.data(), DType::kI8, {12}};
  EXPECT_THAT(backend->PackLinear({&unscaled, 1}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("1 dimensions")));
}

TEST(CpuBackendTest, PackLinearRefusesAHalfMadeInt4Weight) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend();
  RandomLinearOptions options;
  options.n = 16;
  options.k = 64;
  options.group_size = 32;
  RandomLinear layer(options);
  const LinearPart part = layer.part();
  layer.int4().qweight.pop_back();
  EXPECT_THAT(backend->PackLinear({&part, 1}),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("qweight")));
}

TEST(CpuBackendTest, PackLinearRefusesHalfPrecisionAndHugeOutliers) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend();
  RandomLinearOptions options;
  options.n = 16;
  options.k = 64;
  options.group_size = 32;
  const RandomLinear layer(options);
  for (const bool half : {true, false}) {
    TileCooGeometry geometry;
    geometry.k = 64;
    geometry.n = 16;
    if (half) geometry.value_type = TileCooValueType::kHalf;
    const std::vector<TileCooSlot> slots = {
        {3, 4, half ? ToHalf(1.0f).bits : ToBFloat16(1e35f).bits}};
    auto encoded = EncodeTileCoo(geometry, slots);
    FQ_ASSERT_OK(encoded);
    auto matrix = TileCooMatrix::Create(geometry, std::move(encoded->arrays));
    FQ_ASSERT_OK(matrix);
    LinearPart part = layer.part();
    part.outliers = &*matrix;
    EXPECT_THAT(backend->PackLinear({&part, 1}),
                StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(half ? "FP16" : "2^100")));
  }
}

TEST(CpuBackendTest, EmbeddingRefusesAnIdOutsideTheTable) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend();
  RandomLinearOptions options;
  options.n = 10;
  options.k = 4;
  options.int4 = false;
  const RandomLinear layer(options);
  const LinearPart part = layer.part();
  auto table = backend->PackLinear({&part, 1});
  FQ_ASSERT_OK(table);
  std::vector<float> out(8);
  for (const int32_t id : {-1, 10, 1 << 30}) {
    const std::vector<int32_t> ids = {3, id};
    EmbeddingParams params;
    params.num_tokens = 2;
    params.token_ids = ids.data();
    params.table = table->get();
    params.out = out.data();
    EXPECT_THAT(backend->Embedding(params),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("vocabulary of 10")));
  }
}

}  // namespace
}  // namespace flashquant
