// Rope, KV write and paged attention against the oracle, on caches whose blocks lie in no order.
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/parity/parity_fixture.h"
#include "tests/support/random_weights.h"
#include "tests/support/reference_ops.h"
#include "tests/support/tensor_matchers.h"

namespace flashquant {
namespace {

struct Shape {
  int32_t num_heads = 4;
  int32_t num_kv_heads = 2;
  int32_t head_dim = 64;
  int32_t block_tokens = 16;
  int32_t sliding_window = 0;
  int64_t width() const { return int64_t{num_heads + 2 * num_kv_heads} * head_dim; }
};

// A step's rows of one sequence: context length with this step's `rows` tokens.
struct Sequence {
  int32_t context = 0;
  int32_t rows = 0;
};

class AttentionParityTest : public ParityTest {
 protected:
  static constexpr int32_t kMaxPositions = 512;
  static constexpr int32_t kNumBlocks = 160;

  void MakeCache(const Shape& shape) {
    shape_ = shape;
    kv_ = {1, kNumBlocks, shape.block_tokens, shape.num_kv_heads, shape.head_dim};
    k_cache_ = UploadActZeros(kv_.BlockElements() * kNumBlocks);
    v_cache_ = UploadActZeros(kv_.BlockElements() * kNumBlocks);
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

  // Block j (below 39) of a sequence (below 4): any injective map away from the null block.
  int32_t BlockOf(int32_t sequence, int32_t j) const { return 1 + j * 7 % 39 * 4 + sequence; }

  // The whole sequence's unrotated q, k, v rows.
  std::vector<float> SequenceQkv(int32_t sequence, int32_t length) const {
    return RoundToAct(
        RandomFloats(length * shape_.width(), 1.0f, 100 + static_cast<uint64_t>(sequence)));
  }

  // Writes positions [first, first + count) of a sequence and attends from them: the step's output.
  std::vector<float> RunStep(const std::vector<Sequence>& sequences) {
    std::vector<float> qkv;
    std::vector<int32_t> positions;
    std::vector<int64_t> slots;
    std::vector<int32_t> query_indptr = {0};
    std::vector<int32_t> contexts;
    std::vector<int32_t> block_indptr = {0};
    std::vector<int32_t> block_ids;
    for (int32_t s = 0; s < static_cast<int32_t>(sequences.size()); ++s) {
      const Sequence& sequence = sequences[static_cast<size_t>(s)];
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
    attention.k_cache = k_cache_.data();
    attention.v_cache = v_cache_.data();
    attention.out = out.data();
    AttentionBatch host = attention.batch;
    host.query_indptr = query_indptr.data();
    host.context_lengths = contexts.data();
    host.block_indptr = block_indptr.data();
    host.block_ids = block_ids.data();
    FQ_EXPECT_OK(backend().PlanAttention(host));
    if (at_once_) {
      FQ_EXPECT_OK(backend().RopeAndAttention(rope, attention));
    } else {
      FQ_EXPECT_OK(backend().RopeAndKvWrite(rope));
      FQ_EXPECT_OK(backend().PagedAttention(attention));
    }
    return DownloadActs(out);
  }

  float SoftmaxScale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }

  // What a whole sequence's rows should be.
  std::vector<double> Expected(int32_t sequence, int32_t length) const {
    const size_t d = static_cast<size_t>(shape_.head_dim);
    const size_t width = static_cast<size_t>(shape_.width());
    const std::vector<float> raw = SequenceQkv(sequence, length);
    std::vector<double> qkv(raw.begin(), raw.end());
    const std::vector<double> table(host_cos_sin_.begin(), host_cos_sin_.end());
    for (size_t row = 0; row < static_cast<size_t>(length); ++row) {
      for (size_t h = 0; h < static_cast<size_t>(shape_.num_heads + shape_.num_kv_heads); ++h) {
        ReferenceRope({qkv.data() + row * width + h * d, d}, {table.data() + row * d, d / 2},
                      {table.data() + row * d + d / 2, d / 2});
      }
    }
    std::vector<double> out;
    for (size_t row = 0; row < static_cast<size_t>(length); ++row) {
      for (int32_t head = 0; head < shape_.num_heads; ++head) {
        const size_t kv_head = static_cast<size_t>(head / (shape_.num_heads / shape_.num_kv_heads));
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

  void ExpectWholeSequences(const Shape& shape, const std::vector<int32_t>& lengths) {
    MakeCache(shape);
    std::vector<Sequence> sequences;
    std::vector<double> expected;
    for (size_t s = 0; s < lengths.size(); ++s) {
      sequences.push_back({lengths[s], lengths[s]});
      const std::vector<double> rows = Expected(static_cast<int32_t>(s), lengths[s]);
      expected.insert(expected.end(), rows.begin(), rows.end());
    }
    EXPECT_TRUE(AllWithin(RunStep(sequences), expected, Tolerance()))
        << shape.num_heads << ":" << shape.num_kv_heads << " heads of " << shape.head_dim;
  }

  Shape shape_;
  bool at_once_ = true;  // RopeAndAttention, or the two ops one after the other
  PagedKvGeometry kv_;
  DeviceBuffer k_cache_;
  DeviceBuffer v_cache_;
  DeviceBuffer cos_sin_;
  std::vector<float> host_cos_sin_;
};

TEST_P(AttentionParityTest, LengthsAroundBlockAndTileEdges) {
  ExpectWholeSequences({}, {1, 15, 16, 17});
  ExpectWholeSequences({}, {63, 64, 65});
  ExpectWholeSequences({}, {128, 129});
}

TEST_P(AttentionParityTest, HeadSharingOneToOneAndEightToOne) {
  ExpectWholeSequences({.num_heads = 3, .num_kv_heads = 3}, {33});
  ExpectWholeSequences({.num_heads = 8, .num_kv_heads = 1}, {40, 5});
  ExpectWholeSequences({.num_heads = 9, .num_kv_heads = 3}, {70});
}

TEST_P(AttentionParityTest, HeadDimensionsAndBlockSizes) {
  for (const int32_t head_dim : {2, 16, 24, 48, 80, 128, 192, 256}) {
    ExpectWholeSequences({.head_dim = head_dim, .block_tokens = 8}, {37});
  }
  ExpectWholeSequences({.block_tokens = 1}, {21});
  ExpectWholeSequences({.block_tokens = 48}, {100});
}

TEST_P(AttentionParityTest, SlidingWindowSeesTheLastKeysOnly) {
  for (const int32_t window : {1, 16, 50, 64}) {
    ExpectWholeSequences({.sliding_window = window}, {130, 20});
  }
}

TEST_P(AttentionParityTest, DecodeAfterPrefillSeesTheCacheAndAddsToIt) {
  for (const bool at_once : {false, true}) {
    for (const int32_t head_dim : {2, 48, 64, 80, 128, 256}) {
      at_once_ = at_once;
      MakeCache({.head_dim = head_dim});
      RunStep({{64, 64}, {31, 31}});
      for (int32_t step = 1; step <= 3; ++step) {
        const std::vector<float> rows = RunStep({{64 + step, 1}, {31 + step, 1}});
        std::vector<double> expected;
        for (int32_t s = 0; s < 2; ++s) {
          const std::vector<double> all = Expected(s, (s == 0 ? 64 : 31) + step);
          expected.insert(expected.end(), all.end() - shape_.num_heads * head_dim, all.end());
        }
        EXPECT_TRUE(AllWithin(rows, expected, Tolerance()))
            << "head dimension " << head_dim << ", step " << step << ", at once " << at_once;
      }
    }
  }
}

TEST_P(AttentionParityTest, ADecodeRowHasTheSameBitsInEveryKindOfStep) {
  MakeCache({.num_heads = 8, .num_kv_heads = 2});
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

TEST_P(AttentionParityTest, APaddingSequenceIsLeftAlone) {
  MakeCache({});
  RunStep({{20, 20}});
  const std::vector<float> alone = RunStep({{21, 1}});
  const std::vector<float> padded = RunStep({{21, 1}, {0, 1}});
  EXPECT_EQ(padded.size(), 2 * alone.size());
  EXPECT_TRUE(BitEqual({padded.data(), alone.size()}, alone));
}

TEST_P(AttentionParityTest, DecodeOverLongContextsSeesEveryKey) {
  for (const bool at_once : {false, true}) {
    for (const int32_t window : {0, 100, 200, 300}) {
      at_once_ = at_once;
      MakeCache({.num_heads = 8, .num_kv_heads = 2, .head_dim = 48, .sliding_window = window});
      RunStep({{511, 511}, {255, 255}, {299, 299}, {128, 128}});
      const std::vector<float> rows = RunStep({{512, 1}, {256, 1}, {300, 1}, {129, 1}});
      std::vector<double> expected;
      const int32_t lengths[] = {512, 256, 300, 129};
      for (int32_t s = 0; s < 4; ++s) {
        const std::vector<double> all = Expected(s, lengths[s]);
        expected.insert(expected.end(), all.end() - shape_.num_heads * shape_.head_dim, all.end());
      }
      EXPECT_TRUE(AllWithin(rows, expected, Tolerance())) << "window " << window;
    }
  }
}

TEST_P(AttentionParityTest, ManyHeadsOnOneKvHead) {
  for (const bool at_once : {false, true}) {
    at_once_ = at_once;
    MakeCache({.num_heads = 40, .num_kv_heads = 1, .head_dim = 32});
    RunStep({{33, 33}});
    const std::vector<float> rows = RunStep({{34, 1}});
    const std::vector<double> all = Expected(0, 34);
    EXPECT_TRUE(AllWithin(rows, {all.data() + 33 * 40 * 32, size_t{40 * 32}}, Tolerance()));
  }
}

TEST_P(AttentionParityTest, ToleranceRefusesAMissingKey) {
  MakeCache({});
  const std::vector<float> rows = RunStep({{40, 40}});
  shape_.sliding_window = 39;
  EXPECT_FALSE(AllWithin(rows, Expected(0, 40), Tolerance()));
}

TEST_P(AttentionParityTest, ChunkedPrefillGivesTheSameBits) {
  MakeCache({.num_heads = 6, .num_kv_heads = 2});
  const std::vector<float> whole = RunStep({{150, 150}});
  for (const int32_t chunk : {1, 7, 16, 64, 100}) {
    MakeCache(shape_);
    std::vector<float> joined;
    for (int32_t done = 0; done < 150;) {
      const int32_t rows = std::min(chunk, 150 - done);
      done += rows;
      const std::vector<float> part = RunStep({{done, rows}});
      joined.insert(joined.end(), part.begin(), part.end());
    }
    if (chunk == 1 && !acts_are_float()) {
      // A sequence's only row of a step has its keys shared out in another way on CUDA.
      EXPECT_TRUE(AllWithin(joined, std::vector<double>(whole.begin(), whole.end()), Tolerance()));
    } else {
      EXPECT_TRUE(BitEqual(joined, whole)) << "chunks of " << chunk;
    }
  }
}

TEST_P(AttentionParityTest, ASequenceGivesTheSameBitsAmongOthers) {
  MakeCache({});
  const std::vector<float> alone = RunStep({{90, 90}});
  const std::vector<float> together = RunStep({{90, 90}, {17, 17}, {64, 3}});
  EXPECT_TRUE(BitEqual({together.data(), alone.size()}, alone));
}

TEST_P(AttentionParityTest, PaddingRowsWriteNothing) {
  MakeCache({});
  const std::vector<float> qkv = RandomFloats(shape_.width(), 1.0f, 1);
  const DeviceBuffer qkv_device = UploadActs(qkv);
  const DeviceBuffer positions = Upload(std::vector<int32_t>{3});
  const DeviceBuffer slots = Upload(std::vector<int64_t>{-1});
  RopeAndKvWriteParams rope;
  rope.num_tokens = 1;
  rope.num_heads = shape_.num_heads;
  rope.num_kv_heads = shape_.num_kv_heads;
  rope.head_dim = shape_.head_dim;
  rope.qkv = qkv_device.data();
  rope.positions = positions.As<int32_t>();
  rope.slots = slots.As<int64_t>();
  rope.cos_sin = cos_sin_.As<float>();
  rope.kv = kv_;
  rope.k_cache = k_cache_.data();
  rope.v_cache = v_cache_.data();
  FQ_ASSERT_OK(backend().RopeAndKvWrite(rope));
  const std::vector<float> zeros(static_cast<size_t>(kv_.BlockElements() * kNumBlocks));
  EXPECT_TRUE(BitEqual(DownloadActs(k_cache_), zeros));
  EXPECT_TRUE(BitEqual(DownloadActs(v_cache_), zeros));
}

FQ_INSTANTIATE_PARITY(AttentionParityTest);

}  // namespace
}  // namespace flashquant
