// Memory that cannot be had: operator new of the binary that includes this fails when the thread
// that calls it has been told so, and counts. To be included in one file of a binary only.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#include "engine/base/clock.h"

namespace flashquant {

// What happens to the allocations of the thread that sets it.
struct Fault {
  int64_t left = -1;  // allocations until the one that fails; below 0: none does
  bool for_good = false;
  bool suspended = false;
};
inline thread_local Fault fault;
inline std::atomic<bool> allocation_failed{false};
// Not given back yet, of all threads.
inline std::atomic<int64_t> num_living_allocations{0};
// So far.
inline thread_local int64_t num_allocations_of_this_thread = 0;

// Used by the operators below.
inline bool AllocationFails() {
  if (fault.suspended || fault.left < 0) return false;
  if (fault.left > 0) {
    --fault.left;
    return false;
  }
  if (!fault.for_good) fault.left = -1;
  allocation_failed.store(true);
  return true;
}

// Not inlined: compilers hold malloc and free against new and delete.
[[gnu::noinline]] inline void* AllocateOrFail(size_t size) {
  if (AllocationFails()) return nullptr;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) return nullptr;
  ++num_allocations_of_this_thread;
  num_living_allocations.fetch_add(1);
  return memory;
}

[[gnu::noinline]] inline void CountedFree(void* memory) {
  if (memory != nullptr) num_living_allocations.fetch_sub(1);
  std::free(memory);
}

// No allocation of this thread fails while one exists.
class WithoutFaults final {
 public:
  WithoutFaults() { fault.suspended = true; }
  ~WithoutFaults() { fault.suspended = false; }
  WithoutFaults(const WithoutFaults&) = delete;
  WithoutFaults& operator=(const WithoutFaults&) = delete;
};

// For a thread that looks at the time before anything else, as that of the engine and that of
// delivery do: there it waits for Start, and from there on its allocations fail as `thread_fault`
// says. So what it does first is always the same. Each look is a millisecond after the last.
class ThreadStartClock final : public Clock {
 public:
  explicit ThreadStartClock(Fault thread_fault) : thread_fault_(thread_fault) {}
  TimePoint Now() const override {
    if (std::this_thread::get_id() != creator_) ReachStart();
    return TimePoint{} + std::chrono::hours(1) + std::chrono::milliseconds(num_looks_.fetch_add(1));
  }
  void Start() {
    const std::lock_guard lock(mu_);
    started_ = true;
    changed_.notify_all();
  }

 private:
  void ReachStart() const {
    thread_local const ThreadStartClock* seen = nullptr;
    if (seen == this) return;
    seen = this;
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return started_; });
    fault = thread_fault_;
  }

  const Fault thread_fault_;
  const std::thread::id creator_ = std::this_thread::get_id();
  mutable std::atomic<int64_t> num_looks_{0};
  mutable std::mutex mu_;
  mutable std::condition_variable changed_;
  bool started_ = false;
};

}  // namespace flashquant

void* operator new(size_t size) {
  void* memory = flashquant::AllocateOrFail(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return flashquant::AllocateOrFail(size);
}
void operator delete(void* memory) noexcept { flashquant::CountedFree(memory); }
void operator delete(void* memory, size_t) noexcept { flashquant::CountedFree(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  flashquant::CountedFree(memory);
}
