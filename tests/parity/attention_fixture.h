// Sequences in a paged KV cache whose blocks lie in no order, one step of rope, KV write and paged
// attention over them, and what the oracle says of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/base/float8.h"
#include "kernels/base/math_util.h"
#include "tests/parity/parity_fixture.h"
#include "tests/support/random_weights.h"
#include "tests/support/reference_ops.h"
#include "tests/support/tensor_matchers.h"

namespace flashquant {

struct AttentionShape {
  int32_t num_heads = 4;
  int32_t num_kv_heads = 2;
  int32_t head_dim = 64;
  int32_t block_tokens = 16;
  int32_t sliding_window = 0;
  int64_t width() const { return int64_t{num_heads + 2 * num_kv_heads} * head_dim; }
};

// A step's rows of one sequence: context length with this step's `rows` tokens.
struct StepSequence {
  int32_t context = 0;
  int32_t rows = 0;
};

class AttentionFixture : public ParityTest {
 protected:
  static constexpr int32_t kMaxPositions = 512;
  static constexpr int32_t kNumBlocks = 160;

  void MakeCache(const AttentionShape& shape) {
    shape_ = shape;
    kv_ = {1, kNumBlocks, shape.block_tokens, shape.num_kv_heads, shape.head_dim};
    k_cache_ = MakeLayerCache();
    v_cache_ = MakeLayerCache();
    std::vector<float> cos_sin;
    for (int32_t position = 0; position < kMaxPositions; ++position) {
      for (int part = 0; part < 2; ++part) {
        for (int32_t i = 0; i < shape.head_dim / 2; ++i) {
          const double angle = position * std::pow(10000.0, -2.0 * i / shape.head_dim);
          cos_sin.push_back(static_cast<float>(part == 0 ? std::cos(angle) : std::sin(angle)));
        }
      }
    }
    host_cos_sin_ = cos_sin;
    cos_sin_ = Upload(cos_sin);
  }

  DeviceBuffer MakeLayerCache() {
    auto cache = backend().Allocate(kv_.BlockElements() * kNumBlocks *
                                    DTypeBytes(backend().info().kv_dtype));
    EXPECT_TRUE(cache.ok()) << cache.status();
    return *std::move(cache);
  }

  // What a cache holds, as numbers; FP8's without their scale.
  std::vector<double> DownloadCache(const DeviceBuffer& cache) {
    std::vector<double> values;
    switch (backend().info().kv_dtype) {
      case DType::kF8E4M3:
        for (const Float8E4M3 x : Download<Float8E4M3>(cache)) values.push_back(ToFloat(x));
        break;
      case DType::kBF16:
        for (const BFloat16 x : Download<BFloat16>(cache)) values.push_back(ToFloat(x));
        break;
      default:
        for (const float x : Download<float>(cache)) values.push_back(x);
    }
    return values;
  }

  // Block j (below 39) of a sequence (below 4): any injective map away from the null block.
  int32_t BlockOf(int32_t sequence, int32_t j) const { return 1 + j * 7 % 39 * 4 + sequence; }

  // The whole sequence's unrotated q, k, v rows.
  virtual std::vector<float> SequenceQkv(int32_t sequence, int32_t length) const {
    return RoundToAct(
        RandomFloats(length * shape_.width(), 1.0f, 100 + static_cast<uint64_t>(sequence)));
  }

  // Writes positions [first, first + count) of a sequence and attends from them: the step's output.
  std::vector<float> RunStep(const std::vector<StepSequence>& sequences) {
    std::vector<float> qkv;
    std::vector<int32_t> positions;
    std::vector<int64_t> slots;
    std::vector<int32_t> query_indptr = {0};
    std::vector<int32_t> contexts;
    std::vector<int32_t> block_indptr = {0};
    std::vector<int32_t> block_ids;
    for (int32_t s = 0; s < static_cast<int32_t>(sequences.size()); ++s) {
      const StepSequence& sequence = sequences[static_cast<size_t>(s)];
      if (sequence.context == 0) {  // padding
        qkv.resize(qkv.size() + static_cast<size_t>(shape_.width()));
        positions.push_back(0);
        slots.push_back(-1);
        query_indptr.push_back(query_indptr.back() + 1);
        contexts.push_back(0);
        block_indptr.push_back(block_indptr.back());
        continue;
      }
      const std::vector<float> all = SequenceQkv(s, sequence.context);
      const int32_t first = sequence.context - sequence.rows;
      qkv.insert(qkv.end(), all.begin() + first * shape_.width(), all.end());
      for (int32_t position = first; position < sequence.context; ++position) {
        positions.push_back(position);
        const int64_t block = BlockOf(s, position / shape_.block_tokens);
        slots.push_back(block * shape_.block_tokens + position % shape_.block_tokens);
      }
      query_indptr.push_back(query_indptr.back() + sequence.rows);
      contexts.push_back(sequence.context);
      const int32_t blocks = CeilDiv(sequence.context, shape_.block_tokens);
      for (int32_t j = 0; j < blocks; ++j) block_ids.push_back(BlockOf(s, j));
      block_indptr.push_back(block_indptr.back() + blocks);
    }
    const DeviceBuffer qkv_device = UploadActs(qkv);
    const DeviceBuffer positions_device = Upload(positions);
    const DeviceBuffer slots_device = Upload(slots);
    RopeAndKvWriteParams rope;
    rope.num_tokens = static_cast<int32_t>(positions.size());
    rope.num_heads = shape_.num_heads;
    rope.num_kv_heads = shape_.num_kv_heads;
    rope.head_dim = shape_.head_dim;
    rope.qkv = qkv_device.data();
    rope.positions = positions_device.As<int32_t>();
    rope.slots = slots_device.As<int64_t>();
    rope.cos_sin = cos_sin_.As<float>();
    rope.kv = kv_;
    rope.kv_scales = kv_scales_;
    rope.k_cache = k_cache_.data();
    rope.v_cache = v_cache_.data();
    const DeviceBuffer query_indptr_device = Upload(query_indptr);
    const DeviceBuffer contexts_device = Upload(contexts);
    const DeviceBuffer block_indptr_device = Upload(block_indptr);
    const DeviceBuffer block_ids_device = Upload(block_ids);
    const DeviceBuffer out =
        UploadActZeros(rope.num_tokens * int64_t{shape_.num_heads} * shape_.head_dim);
    PagedAttentionParams attention;
    attention.batch.num_sequences = static_cast<int32_t>(sequences.size());
    attention.batch.num_tokens = rope.num_tokens;
    attention.batch.query_indptr = query_indptr_device.As<int32_t>();
    attention.batch.context_lengths = contexts_device.As<int32_t>();
    attention.batch.block_indptr = block_indptr_device.As<int32_t>();
    attention.batch.block_ids = block_ids_device.As<int32_t>();
    attention.num_heads = shape_.num_heads;
    attention.num_kv_heads = shape_.num_kv_heads;
    attention.head_dim = shape_.head_dim;
    attention.softmax_scale = SoftmaxScale();
    attention.sliding_window = shape_.sliding_window;
    attention.qkv = qkv_device.data();
    attention.kv = kv_;
    attention.kv_scales = kv_scales_;
    attention.k_cache = k_cache_.data();
    attention.v_cache = v_cache_.data();
    attention.out = out.data();
    AttentionBatch host = attention.batch;
    host.query_indptr = query_indptr.data();
    host.context_lengths = contexts.data();
    host.block_indptr = block_indptr.data();
    host.block_ids = block_ids.data();
    FQ_EXPECT_OK(backend().PlanAttention(host));
    before_ops_();
    if (at_once_) {
      FQ_EXPECT_OK(backend().RopeAndAttention(rope, attention));
    } else {
      FQ_EXPECT_OK(backend().RopeAndKvWrite(rope));
      FQ_EXPECT_OK(backend().PagedAttention(attention));
    }
    return DownloadActs(out);
  }

  float SoftmaxScale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }

  // The whole sequence's rows with q and k rotated.
  std::vector<double> RotatedQkv(int32_t sequence, int32_t length) const {
    const auto d = static_cast<size_t>(shape_.head_dim);
    const auto width = static_cast<size_t>(shape_.width());
    const std::vector<float> raw = SequenceQkv(sequence, length);
    std::vector<double> qkv(raw.begin(), raw.end());
    const std::vector<double> table(host_cos_sin_.begin(), host_cos_sin_.end());
    for (size_t row = 0; row < static_cast<size_t>(length); ++row) {
      for (size_t h = 0; h < static_cast<size_t>(shape_.num_heads + shape_.num_kv_heads); ++h) {
        ReferenceRope({qkv.data() + row * width + h * d, d}, {table.data() + row * d, d / 2},
                      {table.data() + row * d + d / 2, d / 2});
      }
    }
    return qkv;
  }

  // What a whole sequence's rows should be.
  std::vector<double> Expected(int32_t sequence, int32_t length) const {
    return Attend(RotatedQkv(sequence, length));
  }

  // Attention of all rows of one sequence, each over the keys up to itself and in its window.
  std::vector<double> Attend(const std::vector<double>& qkv) const {
    const auto d = static_cast<size_t>(shape_.head_dim);
    const auto width = static_cast<size_t>(shape_.width());
    std::vector<double> out;
    for (size_t row = 0; row < qkv.size() / width; ++row) {
      for (int32_t head = 0; head < shape_.num_heads; ++head) {
        const auto kv_head = static_cast<size_t>(head / (shape_.num_heads / shape_.num_kv_heads));
        const size_t first =
            shape_.sliding_window > 0 && row + 1 > static_cast<size_t>(shape_.sliding_window)
                ? row + 1 - static_cast<size_t>(shape_.sliding_window)
                : 0;
        std::vector<double> keys;
        std::vector<double> values;
        for (size_t key = first; key <= row; ++key) {
          const double* k =
              qkv.data() + key * width + (static_cast<size_t>(shape_.num_heads) + kv_head) * d;
          const double* v = k + static_cast<size_t>(shape_.num_kv_heads) * d;
          keys.insert(keys.end(), k, k + d);
          values.insert(values.end(), v, v + d);
        }
        const double* q = qkv.data() + row * width + static_cast<size_t>(head) * d;
        const std::vector<double> result =
            ReferenceAttentionHead({q, d}, keys, values, SoftmaxScale());
        out.insert(out.end(), result.begin(), result.end());
      }
    }
    return out;
  }

  // Scores are sums of D products of about unit size, weights their exponentials, outputs averages
  // of values of up to about 5. In BF16 the rotated q and k, the weights and the outputs are
  // rounded: scores are off by about the roundoff, whatever D is.
  double Tolerance() const {
    return 5.0 * 16.0 * kFloatRoundoff * std::sqrt(shape_.head_dim) + 5.0 * 2.0 * ActRounding(1.0);
  }

  void ExpectWholeSequences(const AttentionShape& shape, const std::vector<int32_t>& lengths) {
    MakeCache(shape);
    std::vector<StepSequence> sequences;
    std::vector<double> expected;
    for (size_t s = 0; s < lengths.size(); ++s) {
      sequences.push_back({lengths[s], lengths[s]});
      const std::vector<double> rows = Expected(static_cast<int32_t>(s), lengths[s]);
      expected.insert(expected.end(), rows.begin(), rows.end());
    }
    EXPECT_TRUE(AllWithin(RunStep(sequences), expected, Tolerance()))
        << shape.num_heads << ":" << shape.num_kv_heads << " heads of " << shape.head_dim;
  }

  // A decode row alone, among other decode rows, beside a prompt, and by the two ops apart, which
  // is what at_once_ is left at. On a new cache.
  void ExpectSameBitsOfADecodeRow() {
    RunStep({{300, 300}, {20, 20}, {40, 40}});
    const std::vector<float> together = RunStep({{301, 1}, {21, 1}, {41, 1}});
    const std::vector<float> alone = RunStep({{301, 1}});
    const std::vector<float> mixed = RunStep({{301, 1}, {30, 9}});
    at_once_ = false;
    const std::vector<float> apart = RunStep({{301, 1}});
    EXPECT_TRUE(BitEqual({together.data(), alone.size()}, alone));
    EXPECT_TRUE(BitEqual({mixed.data(), alone.size()}, alone));
    EXPECT_TRUE(BitEqual(apart, alone));
  }

  AttentionShape shape_;
  bool at_once_ = true;  // RopeAndAttention, or the two ops one after the other
  std::function<void()> before_ops_ = [] {};  // queues what runs before them
  PagedKvGeometry kv_;
  KvScales kv_scales_;
  DeviceBuffer k_cache_;
  DeviceBuffer v_cache_;
  DeviceBuffer cos_sin_;
  std::vector<float> host_cos_sin_;
};

}  // namespace flashquant
