// Where the time of loading a model goes: seconds by stage, and the tensor source that tells
// reading apart from checking.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "engine/base/clock.h"
#include "engine/checkpoint/tensor_source.h"

namespace flashquant {

// Several threads read and check while one packs, so the sum may be more than the whole time.
struct LoadSeconds {
  double read = 0;    // bytes from the files, their checksums compared; all readers together
  double verify = 0;  // every other check of them, and conversion; all readers together
  double pack = 0;    // into the backend's form; a GPU's copies of INT4 weights are in it
  double upload = 0;  // norms and tables to the backend
};

// Adds up durations. Safe from any thread.
class TimeSum final {
 public:
  void Add(Duration duration) { sum_.fetch_add(duration.count(), std::memory_order_relaxed); }
  double seconds() const { return ToSeconds(Duration(sum_.load(std::memory_order_relaxed))); }

 private:
  std::atomic<Duration::rep> sum_{0};
};

// Adds the time from its making to its end to `sum`.
class ScopedTime final {
 public:
  explicit ScopedTime(TimeSum* sum) : sum_(sum), start_(SteadyClock().Now()) {}
  ~ScopedTime() { sum_->Add(SteadyClock().Now() - start_); }
  ScopedTime(const ScopedTime&) = delete;
  ScopedTime& operator=(const ScopedTime&) = delete;

 private:
  TimeSum* const sum_;
  const TimePoint start_;
};

// The tensors of `source`, which outlives it, with the time that reading them took.
class TimedTensors final : public TensorSource {
 public:
  explicit TimedTensors(const TensorSource& source) : source_(source) {}

  const std::vector<TensorInfo>& tensors() const override { return source_.tensors(); }
  bool IsGenerated() const override { return source_.IsGenerated(); }
  std::optional<uint32_t> StoredChecksum(const TensorInfo& tensor) const override {
    return source_.StoredChecksum(tensor);
  }
  absl::Status ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                        void* out) const override {
    const ScopedTime time(&reading_);
    return source_.ReadRows(tensor, first_row, num_rows, out);
  }

  double seconds() const { return reading_.seconds(); }

 private:
  const TensorSource& source_;
  mutable TimeSum reading_;
};

}  // namespace flashquant
