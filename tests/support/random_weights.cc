#include "tests/support/random_weights.h"

#include <cstring>

#include "kernels/base/check.h"
#include "kernels/format/tile_coo_encoder.h"

namespace flashquant {
namespace {

void SetCode(Int4Weight& weight, int64_t n, int64_t k, int32_t code) {
  uint8_t& byte = weight.qweight[static_cast<size_t>(n * (weight.k_padded / 2) + k / 2)];
  byte = static_cast<uint8_t>(k % 2 == 0 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
}

Int4Weight MakeInt4(const RandomLinearOptions& options, std::mt19937_64& random) {
  Int4Weight weight;
  weight.n = options.n;
  weight.k = options.k;
  weight.n_padded = RoundUp<int64_t>(options.n, 8);
  const bool one_group = options.group_size == -1;
  weight.k_padded = RoundUp<int64_t>(options.k, one_group ? 2 : options.group_size);
  weight.group_size = one_group ? weight.k_padded : options.group_size;
  weight.symmetric = options.symmetric;
  const auto groups = static_cast<size_t>(weight.n_padded * weight.groups_per_row());
  weight.scales.resize(groups);
  if (!options.symmetric) weight.zeros.resize(groups);
  for (uint8_t& zero : weight.zeros) zero = static_cast<uint8_t>(random() % 16);
  for (int64_t i = 0; i < options.n * weight.groups_per_row(); ++i) {
    weight.scales[static_cast<size_t>(i)] =
        ToBFloat16(static_cast<float>(1 + random() % 100) * 1e-4f);
  }
  weight.qweight.resize(static_cast<size_t>(weight.n_padded * weight.k_padded / 2));
  for (uint8_t& byte : weight.qweight) byte = static_cast<uint8_t>(random());
  for (int64_t n = 0; n < weight.n_padded; ++n) {
    for (int64_t k = n < weight.n ? weight.k : 0; k < weight.k_padded; ++k) {
      SetCode(weight, n, k, weight.ZeroPoint(n, k / weight.group_size));
    }
  }
  return weight;
}

TileCooMatrix MakeOutliers(const RandomLinearOptions& options, Int4Weight& weight,
                           std::mt19937_64& random) {
  TileCooGeometry geometry;
  geometry.k = options.k;
  geometry.n = options.n;
  std::vector<TileCooSlot> slots;
  std::bernoulli_distribution chosen(options.density);
  std::normal_distribution<float> value(0.0f, 0.5f);
  for (int64_t n = 0; n < options.n; ++n) {
    for (int64_t k = 0; k < options.k; ++k) {
      if (!chosen(random)) continue;
      TileCooSlot slot;
      slot.k = static_cast<int32_t>(k);
      slot.n = static_cast<int32_t>(n);
      slot.value_bits = ToBFloat16(value(random)).bits;
      if ((slot.value_bits & 0x7fff) == 0) continue;
      slots.push_back(slot);
      SetCode(weight, n, k, weight.ZeroPoint(n, k / weight.group_size));
    }
  }
  auto encoded = EncodeTileCoo(geometry, slots);
  FQ_CHECK(encoded.ok());
  auto matrix = TileCooMatrix::Create(geometry, std::move(encoded->arrays));
  FQ_CHECK(matrix.ok());
  return *std::move(matrix);
}

std::vector<uint8_t> MakeDense(const RandomLinearOptions& options, std::mt19937_64& random) {
  const int64_t count = options.n * options.k;
  const int64_t element_bytes = DTypeBytes(options.dense_dtype);
  std::vector<uint8_t> bytes(static_cast<size_t>(count * element_bytes));
  std::normal_distribution<float> distribution(0.0f, 0.02f);
  for (int64_t i = 0; i < count; ++i) {
    const float value = distribution(random);
    const BFloat16 bf16 = ToBFloat16(value);
    const Half half = ToHalf(value);
    const auto code = static_cast<int8_t>(random() % 256);
    const void* from = &value;
    if (options.dense_dtype == DType::kBF16) from = &bf16;
    if (options.dense_dtype == DType::kF16) from = &half;
    if (options.dense_dtype == DType::kI8) from = &code;
    std::memcpy(bytes.data() + i * element_bytes, from, static_cast<size_t>(element_bytes));
  }
  return bytes;
}

}  // namespace

std::vector<float> RandomFloats(int64_t count, float deviation, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> distribution(0.0f, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(random);
  return values;
}

RandomLinear::RandomLinear(const RandomLinearOptions& options) : options_(options) {
  std::mt19937_64 random(options.seed);
  if (options.int4) {
    int4_ = std::make_unique<Int4Weight>(MakeInt4(options, random));
    if (options.density > 0.0) {
      outliers_ = std::make_unique<TileCooMatrix>(MakeOutliers(options, *int4_, random));
    }
  } else {
    dense_ = MakeDense(options, random);
    for (int64_t n = 0; n < options.n; ++n) {
      row_scales_.push_back(ToBFloat16(static_cast<float>(1 + random() % 100) * 1e-4f));
    }
  }
  for (int64_t n = 0; options.bias && n < options.n; ++n) {
    bias_.push_back(ToBFloat16(static_cast<float>(random() % 100) * 0.01f - 0.5f));
  }
}

LinearPart RandomLinear::part() const {
  LinearPart part;
  part.int4 = int4_.get();
  part.outliers = outliers_.get();
  if (!options_.int4) {
    part.dense = {dense_.data(), options_.dense_dtype, {options_.n, options_.k}};
    if (options_.dense_dtype == DType::kI8) part.row_scales = row_scales_.data();
  }
  part.bias = options_.bias ? bias_.data() : nullptr;
  return part;
}

}  // namespace flashquant
