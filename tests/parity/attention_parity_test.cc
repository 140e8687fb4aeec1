// Rope, KV write and paged attention against the oracle, with the backend's own type of cache.
#include <cstdint>
#include <vector>

#include "tests/parity/attention_fixture.h"

namespace flashquant {
namespace {

class AttentionParityTest : public AttentionFixture {};

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
  ExpectSameBitsOfADecodeRow();
}

// A kernel may begin while the ones before it run: a decode row among prompts must not read its own
// key before it is written.
TEST_P(AttentionParityTest, AMixedStepBehindALongKernelHasTheSameBits) {
  constexpr int32_t kLongRow = 65536;
  const DeviceBuffer weight = Upload(std::vector<float>(kLongRow, 1.0f));
  const DeviceBuffer x = UploadActZeros(8 * kLongRow);
  std::vector<std::vector<float>> results;
  for (const bool behind : {false, true}) {
    MakeCache({.num_heads = 8, .num_kv_heads = 2});
    RunStep({{300, 300}, {20, 20}});
    if (behind) {
      before_ops_ = [&] {
        RmsNormParams norm;
        norm.num_rows = 8;
        norm.hidden = kLongRow;
        norm.x = x.data();
        norm.weight = weight.data();
        norm.out = x.data();
        for (int i = 0; i < 3; ++i) FQ_EXPECT_OK(backend().RmsNorm(norm));
      };
    }
    results.push_back(RunStep({{301, 1}, {30, 10}}));
  }
  EXPECT_TRUE(BitEqual(results[1], results[0]));
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

// Rows times KV heads decide into how many blocks a GPU cuts a decode row.
TEST_P(AttentionParityTest, FewAndManyRowsAndKvHeads) {
  const bool gpu = backend().info().name == "cuda";
  for (const int32_t num_kv_heads : gpu ? std::vector{8, 20, 50, 75, 110} : std::vector{8}) {
    at_once_ = true;
    MakeCache({.num_heads = 2 * num_kv_heads, .num_kv_heads = num_kv_heads, .head_dim = 16});
    const int32_t lengths[] = {311, 300, 257, 40};
    std::vector<StepSequence> before;
    std::vector<StepSequence> step;
    std::vector<double> expected;
    for (int32_t s = 0; s < 4; ++s) {
      before.push_back({lengths[s] - 1, lengths[s] - 1});
      step.push_back({lengths[s], 1});
      const std::vector<double> all = Expected(s, lengths[s]);
      expected.insert(expected.end(), all.end() - shape_.num_heads * shape_.head_dim, all.end());
    }
    RunStep(before);
    EXPECT_TRUE(AllWithin(RunStep(step), expected, Tolerance())) << num_kv_heads << " KV heads";
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
  const std::vector<double> zeros(static_cast<size_t>(kv_.BlockElements() * kNumBlocks));
  EXPECT_EQ(DownloadCache(k_cache_), zeros);
  EXPECT_EQ(DownloadCache(v_cache_), zeros);
}

FQ_INSTANTIATE_PARITY(AttentionParityTest);

}  // namespace
}  // namespace flashquant
