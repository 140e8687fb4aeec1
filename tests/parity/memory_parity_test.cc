// Backend memory: what copies and read-backs promise about when host and device memory may change.
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/parity/parity_fixture.h"

namespace flashquant {
namespace {

class MemoryParityTest : public ParityTest {
 protected:
  static std::vector<int32_t> Numbers(size_t count, int32_t first) {
    std::vector<int32_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), first);
    return numbers;
  }
  void Overwrite(const DeviceBuffer& buffer, const std::vector<int32_t>& numbers) {
    FQ_ASSERT_OK(backend().CopyToDevice(buffer.data(), numbers.data(),
                                        static_cast<int64_t>(numbers.size() * sizeof(int32_t))));
  }
};

TEST_P(MemoryParityTest, NewMemoryIsZeroAndAligned) {
  for (const int64_t num_bytes : {int64_t{4}, int64_t{1000}, int64_t{5} << 20}) {
    auto buffer = backend().Allocate(num_bytes);
    FQ_ASSERT_OK(buffer);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 256, 0u);
    EXPECT_EQ(Download<int32_t>(*buffer),
              std::vector<int32_t>(static_cast<size_t>(num_bytes) / sizeof(int32_t)));
  }
  auto nothing = backend().Allocate(0);
  FQ_ASSERT_OK(nothing);
  EXPECT_EQ(nothing->num_bytes(), 0);
}

TEST_P(MemoryParityTest, MoreMemoryThanThereIsIsRefused) {
  EXPECT_THAT(backend().Allocate(int64_t{1} << 50).status(),
              StatusIs(absl::StatusCode::kResourceExhausted, testing::HasSubstr("memory")));
}

// Small arrays many times and arrays larger than any staging buffer; the host array is rewritten
// while copies may still be under way.
TEST_P(MemoryParityTest, HostMemoryMayChangeOnceCopyToDeviceReturns) {
  std::vector<DeviceBuffer> buffers;
  std::vector<std::vector<int32_t>> expected;
  std::vector<int32_t> host;
  for (int32_t i = 0; i < 40; ++i) {
    const size_t count = i % 10 == 9 ? 3'000'001 : 1000 + static_cast<size_t>(i);
    host = Numbers(count, i);
    expected.push_back(host);
    auto buffer = backend().Allocate(static_cast<int64_t>(count * sizeof(int32_t)));
    FQ_ASSERT_OK(buffer);
    buffers.push_back(*std::move(buffer));
    Overwrite(buffers.back(), host);
    std::fill(host.begin(), host.end(), -1);
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    EXPECT_EQ(Download<int32_t>(buffers[i]), expected[i]) << "copy " << i;
  }
}

TEST_P(MemoryParityTest, AReadBackHasWhatWasThereWhenItWasQueued) {
  const DeviceBuffer first = Upload(Numbers(5000, 10));
  const DeviceBuffer second = Upload(Numbers(3, 7));
  FQ_ASSERT_OK(backend().QueueReadBack(0, first.data(), first.num_bytes()));
  FQ_ASSERT_OK(backend().QueueReadBack(1, second.data(), second.num_bytes()));
  Overwrite(first, Numbers(5000, -90000));
  std::vector<int32_t> small(3);
  FQ_ASSERT_OK(backend().FinishReadBack(1, small.data()));
  EXPECT_EQ(small, Numbers(3, 7));
  std::vector<int32_t> large(5000);
  FQ_ASSERT_OK(backend().FinishReadBack(0, large.data()));
  EXPECT_EQ(large, Numbers(5000, 10));
}

TEST_P(MemoryParityTest, AReadBackSlotIsFreeAgainAndMayBeEmpty) {
  const DeviceBuffer buffer = Upload(Numbers(100, 0));
  std::vector<int32_t> host(100);
  for (int32_t round = 0; round < 3; ++round) {
    Overwrite(buffer, Numbers(100, round));
    FQ_ASSERT_OK(backend().QueueReadBack(1, buffer.data(), buffer.num_bytes()));
    FQ_ASSERT_OK(backend().FinishReadBack(1, host.data()));
    EXPECT_EQ(host, Numbers(100, round));
  }
  FQ_ASSERT_OK(backend().QueueReadBack(1, buffer.data(), 0));
  FQ_ASSERT_OK(backend().FinishReadBack(1, host.data()));
  EXPECT_EQ(host, Numbers(100, 2));
}

TEST_P(MemoryParityTest, RecordedOpsRunAgainOnWhatMemoryHoldsThen) {
  constexpr int32_t kHidden = 16;
  const DeviceBuffer weight = Upload(std::vector<float>(kHidden, 1.0f));
  const DeviceBuffer residual = UploadActZeros(kHidden);
  const DeviceBuffer out = UploadActZeros(kHidden);
  auto x = std::make_unique<DeviceBuffer>(UploadActs(std::vector<float>(kHidden, 1.0f)));
  const auto add = [&](int64_t key) {  // residual += x
    return backend().RunRecorded(this, key, [&] {
      return backend().RmsNorm({.num_rows = 1,
                                .hidden = kHidden,
                                .x = x->data(),
                                .residual = residual.data(),
                                .weight = weight.data(),
                                .out = out.data()});
    });
  };
  for (int i = 0; i < 3; ++i) FQ_ASSERT_OK(add(1));
  EXPECT_EQ(DownloadActs(residual), std::vector<float>(kHidden, 3.0f));
  const DeviceBuffer twos = UploadActs(std::vector<float>(kHidden, 2.0f));
  FQ_ASSERT_OK(backend().GatherRows({.num_rows = 1,
                                     .hidden = kHidden,
                                     .row_indices = Upload(std::vector<int32_t>{0}).As<int32_t>(),
                                     .in = twos.data(),
                                     .out = x->data()}));
  for (int i = 0; i < 2; ++i) FQ_ASSERT_OK(add(1));
  FQ_ASSERT_OK(add(2));
  EXPECT_EQ(DownloadActs(residual), std::vector<float>(kHidden, 9.0f));
  // Other memory, the same key: what was recorded ended with the memory that it used.
  x = std::make_unique<DeviceBuffer>(UploadActs(std::vector<float>(kHidden, 5.0f)));
  FQ_ASSERT_OK(add(1));
  EXPECT_EQ(DownloadActs(residual), std::vector<float>(kHidden, 14.0f));
}

TEST_P(MemoryParityTest, AnErrorOfARecordedOpIsReportedAndNothingIsKept) {
  int calls = 0;
  const auto fail = [&] {
    ++calls;
    return absl::InvalidArgumentError("no");
  };
  EXPECT_THAT(backend().RunRecorded(this, 7, fail),
              StatusIs(absl::StatusCode::kInvalidArgument, "no"));
  EXPECT_THAT(backend().RunRecorded(this, 7, fail),
              StatusIs(absl::StatusCode::kInvalidArgument, "no"));
  EXPECT_EQ(calls, 2);
  FQ_EXPECT_OK(backend().Synchronize());
}

FQ_INSTANTIATE_PARITY(MemoryParityTest);

TEST(BackendChoiceTest, AutoTakesWhatThereIsAndCudaSaysWhyNot) {
  const auto chosen = CreateBackend({.kind = "auto"});
  FQ_ASSERT_OK(chosen);
  const auto cuda = CreateBackend({.kind = "cuda"});
  if (cuda.ok()) {
    EXPECT_EQ((*cuda)->info().name, "cuda");
    EXPECT_EQ((*chosen)->info().name, "cuda");
    return;
  }
  EXPECT_THAT(cuda.status(),
              StatusIs(absl::StatusCode::kUnavailable, testing::HasSubstr("'cuda'")));
  EXPECT_EQ((*chosen)->info().name, "cpu");
}

}  // namespace
}  // namespace flashquant
