// The types of KV cache besides a backend's own, BF16 and FP8: what is written, and attention over
// it against an oracle that has the same rounded keys and values.
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "tests/parity/attention_fixture.h"
#include "tests/support/reference_float8.h"

namespace flashquant {
namespace {

class KvCacheParityTest : public AttentionFixture {
 protected:
  // Element `i` of a sequence's rows is changed to a value.
  std::map<size_t, float> changes_;
  std::vector<float> SequenceQkv(int32_t sequence, int32_t length) const override {
    std::vector<float> qkv = AttentionFixture::SequenceQkv(sequence, length);
    for (const auto& [i, value] : changes_) qkv[i] = value;
    return qkv;
  }

  // Calls check(k or v as it came out of rotation, what the cache has of it) for every element.
  template <typename Check>
  void ForEachCached(int32_t sequence, int32_t length, const Check& check) {
    std::vector<double> qkv = RotatedQkv(sequence, length);
    ForEachCached(sequence, &qkv, check);
  }
  template <typename Check>
  void ForEachCached(int32_t sequence, std::vector<double>* qkv, const Check& check) {
    const std::vector<double> keys = DownloadCache(k_cache_);
    const std::vector<double> values = DownloadCache(v_cache_);
    const auto width = static_cast<size_t>(shape_.width());
    for (size_t row = 0; row < qkv->size() / width; ++row) {
      const auto position = static_cast<int32_t>(row);
      const int64_t block = BlockOf(sequence, position / shape_.block_tokens);
      double* k = qkv->data() + row * width + shape_.num_heads * shape_.head_dim;
      double* v = k + shape_.num_kv_heads * shape_.head_dim;
      for (int32_t head = 0; head < shape_.num_kv_heads; ++head) {
        const auto from =
            static_cast<size_t>(kv_.RowOffset(block, head, position % shape_.block_tokens));
        for (size_t i = 0; i < static_cast<size_t>(shape_.head_dim); ++i) {
          check(*k++, keys[from + i], kv_scales_.k);
          check(*v++, values[from + i], kv_scales_.v);
        }
      }
    }
  }

  // What the rows of a sequence should be, given what the cache has.
  std::vector<double> ExpectedOfCache(int32_t sequence, int32_t length) {
    std::vector<double> qkv = RotatedQkv(sequence, length);
    const bool scaled = backend().info().kv_dtype == DType::kF8E4M3;
    ForEachCached(sequence, &qkv, [&](double& x, double cached, float scale) {
      x = scaled ? cached * static_cast<double>(scale) : cached;
    });
    return Attend(qkv);
  }

  // Runs whole sequences, then three steps of one row each, and compares all with the oracle.
  void ExpectPromptsAndDecode(const AttentionShape& shape, const std::vector<int32_t>& lengths) {
    MakeCache(shape);
    std::vector<StepSequence> sequences;
    for (const int32_t length : lengths) sequences.push_back({length, length});
    ExpectStep(sequences);
    for (int32_t step = 1; step <= 3; ++step) {
      for (StepSequence& sequence : sequences) sequence = {sequence.context + 1, 1};
      ExpectStep(sequences);
    }
  }

  void ExpectStep(const std::vector<StepSequence>& sequences) {
    const std::vector<float> rows = RunStep(sequences);
    std::vector<double> expected;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const std::vector<double> all =
          ExpectedOfCache(static_cast<int32_t>(s), sequences[s].context);
      const auto width = static_cast<int64_t>(shape_.num_heads) * shape_.head_dim;
      expected.insert(expected.end(), all.end() - sequences[s].rows * width, all.end());
    }
    EXPECT_TRUE(AllWithin(rows, expected, Tolerance()))
        << DTypeName(backend().info().kv_dtype) << ", " << shape_.num_heads << ":"
        << shape_.num_kv_heads << " heads of " << shape_.head_dim << ", blocks of "
        << shape_.block_tokens << ", window " << shape_.sliding_window << ", rows "
        << sequences[0].rows << ", at once " << at_once_;
  }
};

TEST_P(KvCacheParityTest, FP8HoldsTheNearestCodesOfKeysAndValues) {
  MakeBackend("fp8");
  for (const KvScales scales : {KvScales{1.0f, 1.0f}, KvScales{0.37f, 0.011f}}) {
    for (const bool at_once : {false, true}) {
      at_once_ = at_once;
      kv_scales_ = scales;
      MakeCache({.num_heads = 4, .num_kv_heads = 2, .head_dim = 64});
      RunStep({{50, 50}, {19, 19}});
      RunStep({{51, 1}, {20, 1}});
      int64_t wrong = 0;
      for (int32_t s = 0; s < 2; ++s) {
        ForEachCached(s, s == 0 ? 51 : 20, [&](double x, double cached, float scale) {
          // Rotation in FP32, perhaps rounded to BF16, and the division by the scale.
          const double error = 1e-6 + ActRounding(x);
          const double low = (x - error) / static_cast<double>(scale);
          const double high = (x + error) / static_cast<double>(scale);
          const bool near =
              cached >= ReferenceFloat8Nearest(low) && cached <= ReferenceFloat8Nearest(high);
          if (!near) ++wrong;
        });
      }
      EXPECT_EQ(wrong, 0) << "scales " << scales.k << ", " << scales.v;
    }
  }
}

TEST_P(KvCacheParityTest, AttentionIsThatOfTheKeysAndValuesInTheCache) {
  for (const char* dtype : {"bf16", "fp8"}) {
    MakeBackend(dtype);
    for (const bool at_once : {false, true}) {
      at_once_ = at_once;
      kv_scales_ = {0.75f, 1.3f};
      for (const int32_t head_dim : {16, 48, 64, 80, 96, 128, 192, 256}) {
        ExpectPromptsAndDecode({.head_dim = head_dim, .block_tokens = 8}, {37, 64});
      }
      ExpectPromptsAndDecode({.num_heads = 3, .num_kv_heads = 3, .block_tokens = 1}, {33});
      ExpectPromptsAndDecode({.num_heads = 9, .num_kv_heads = 3, .block_tokens = 48}, {62, 127});
      ExpectPromptsAndDecode({.num_heads = 40, .num_kv_heads = 1, .head_dim = 32}, {33});
      ExpectPromptsAndDecode({.num_heads = 8, .num_kv_heads = 1, .sliding_window = 50}, {130, 20});
    }
  }
}

TEST_P(KvCacheParityTest, DecodeOverLongContextsSeesEveryKeyOfAnFP8Cache) {
  MakeBackend("fp8");
  for (const int32_t window : {0, 200}) {
    MakeCache({.num_heads = 8, .num_kv_heads = 2, .sliding_window = window});
    RunStep({{511, 511}, {255, 255}, {299, 299}, {128, 128}});
    ExpectStep({{512, 1}, {256, 1}, {300, 1}, {129, 1}});
  }
}

TEST_P(KvCacheParityTest, ARowOverAnFP8CacheHasTheSameBitsInEveryKindOfStep) {
  MakeBackend("fp8");
  MakeCache({.num_heads = 8, .num_kv_heads = 2});
  ExpectSameBitsOfADecodeRow();
  at_once_ = true;
  MakeCache(shape_);
  const std::vector<float> whole = RunStep({{150, 150}});
  MakeCache(shape_);
  std::vector<float> joined;
  for (const int32_t done : {64, 100, 150}) {
    const int32_t rows = done == 64 ? 64 : done == 100 ? 36 : 50;
    const std::vector<float> part = RunStep({{done, rows}});
    joined.insert(joined.end(), part.begin(), part.end());
  }
  EXPECT_TRUE(BitEqual(joined, whole));
}

TEST_P(KvCacheParityTest, ValuesBeyondFP8AreClampedByTheirScale) {
  MakeBackend("fp8");
  MakeCache({.num_heads = 2, .num_kv_heads = 2, .head_dim = 16});
  kv_scales_.v = 2.0f;
  // Of the only row: value 3 of head 0, value 5 of head 1.
  const size_t first_value = 4 * 16;
  changes_ = {{first_value + 3, 5000.0f}, {first_value + 16 + 5, -100.0f}};
  const std::vector<float> out = RunStep({{1, 1}});
  EXPECT_EQ(out[3], 2 * 448.0f);
  EXPECT_EQ(out[16 + 5], 2 * static_cast<float>(ReferenceFloat8Nearest(-50.0)));
}

TEST_P(KvCacheParityTest, WhatIsNotFiniteIsStillSeenThroughAnFP8Cache) {
  MakeBackend("fp8");
  const AttentionShape shape = {.num_heads = 2, .num_kv_heads = 2, .head_dim = 32};
  const size_t first_key = 2 * 32;
  const size_t first_value = 4 * 32;
  for (const size_t element : {first_key + 7, first_value + 7}) {
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const int32_t rows : {20, 1}) {
        changes_.clear();
        MakeCache(shape);
        changes_ = {{element, value}};  // of head 0, position 0
        if (rows == 1) RunStep({{19, 19}});
        const std::vector<float> out = RunStep({{20, rows}});
        const float* last = out.data() + (rows - 1) * 2 * 32;
        EXPECT_TRUE(std::isnan(last[7])) << element << ", " << value << ", " << rows << " rows";
        for (int i = 0; i < 32; ++i) EXPECT_TRUE(std::isfinite(last[32 + i]));
      }
    }
  }
}

TEST_P(KvCacheParityTest, TheToleranceRefusesKeysOfAnotherScale) {
  MakeBackend("fp8");
  MakeCache({});
  kv_scales_ = {0.8f, 1.0f};
  const std::vector<float> rows = RunStep({{40, 40}});
  kv_scales_ = {0.9f, 1.0f};
  EXPECT_FALSE(AllWithin(rows, ExpectedOfCache(0, 40), Tolerance()));
}

TEST_P(KvCacheParityTest, HeadsThatAGpuCannotLoadInWholePiecesAreRefused) {
  MakeBackend("fp8");
  if (backend().info().name != "cuda") {
    ExpectPromptsAndDecode({.head_dim = 24}, {20});
    ExpectPromptsAndDecode({.head_dim = 2}, {20});
    return;
  }
  const int32_t zero = 0;
  AttentionBatch nothing;
  nothing.query_indptr = &zero;
  nothing.block_indptr = &zero;
  FQ_ASSERT_OK(backend().PlanAttention(nothing));
  PagedAttentionParams params;
  params.num_heads = 2;
  params.num_kv_heads = 1;
  params.head_dim = 24;
  EXPECT_THAT(backend().PagedAttention(params),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       testing::HasSubstr("head dimension 24 with an FP8 KV cache")));
}

FQ_INSTANTIATE_PARITY(KvCacheParityTest);

}  // namespace
}  // namespace flashquant
