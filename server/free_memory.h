// Gives back what a burst of calls leaves in the allocator.
//
// gRPC takes 5 to 30 KiB for each open call from the C library's allocator, which keeps what it
// once had: 1,000 calls at once leave up to 30 MB resident for ever, resets by the ten thousand
// hundreds. Nothing leaks, but the server's size would tell of its worst moment. So a thread looks
// once a second, and calls malloc_trim when that frees enough: it gives back whole free pages
// anywhere in the heap. The end of an arena other than the main one it leaves; limits set at the
// start do that.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "server/watchdog.h"

namespace flashquant {

struct MemoryUse {
  int64_t resident_bytes = 0;
  int64_t allocated_bytes = 0;  // of the C library's allocator
};

// Few arenas, whose ends are trimmed. Before other threads start.
void LimitFreeMemory();

// Of this process; zeros where the system does not say. Walks the allocator's free chunks.
MemoryUse ReadMemoryUse();

// When to trim. What is resident and not allocated (code, stacks, the KV pool's touched pages, free
// memory) has no fixed size, so its growth since the last trim counts.
class TrimRule final {
 public:
  // Trimming holds an arena's lock for 0.1 ms a MiB (measured: 64 MiB 6.6 ms, 564 MiB 53 ms): with
  // calls open it has to free much.
  static constexpr int64_t kIdleBytes = int64_t{256} << 10;
  static constexpr int64_t kBusyBytes = int64_t{64} << 20;

  // To be called about every second; true when memory is to be given back now. Idle means: no call
  // was open in this look and in the one before it. The first idle look always gives back.
  bool Look(const MemoryUse& use, int64_t open_calls);
  // What was left after that.
  void Trimmed(const MemoryUse& use);

 private:
  std::optional<int64_t> floor_bytes_;
  bool idle_before_ = false;
};

// Follows the rule until it is destroyed. `open_calls` is asked on the thread of the check.
std::unique_ptr<PeriodicCheck> GiveFreeMemoryBack(std::function<int64_t()> open_calls);

}  // namespace flashquant
