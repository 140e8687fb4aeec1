// Source: mallopt(3), malloc_trim(3), mallinfo2(3), proc(5); glibc's malloc/arena.c for the ends of
// arenas.
#include "server/free_memory.h"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <utility>

#include "spdlog/spdlog.h"

namespace flashquant {
namespace {

constexpr auto kInterval = std::chrono::seconds(1);
constexpr int kThresholdBytes = 1 << 20;

int64_t BesidesAllocated(const MemoryUse& use) { return use.resident_bytes - use.allocated_bytes; }

}  // namespace

void LimitFreeMemory() {
  // gRPC's threads each get an arena otherwise.
  mallopt(M_ARENA_MAX, 2);
  // Left alone, both thresholds rise with the largest mapping that was freed, which is a buffer of
  // the model's loading: then up to 64 MiB stay at the end of the second arena, after each burst
  // another amount.
  mallopt(M_MMAP_THRESHOLD, kThresholdBytes);
  mallopt(M_TRIM_THRESHOLD, kThresholdBytes);
}

MemoryUse ReadMemoryUse() {
  std::ifstream file("/proc/self/statm");
  int64_t size_pages = 0;
  int64_t resident_pages = 0;
  if (!(file >> size_pages >> resident_pages)) return {};
  const struct mallinfo2 info = mallinfo2();
  return {resident_pages * sysconf(_SC_PAGESIZE),
          static_cast<int64_t>(info.uordblks) + static_cast<int64_t>(info.hblkhd)};
}

bool TrimRule::Look(const MemoryUse& use, int64_t open_calls) {
  const bool idle = std::exchange(idle_before_, open_calls == 0) && open_calls == 0;
  if (!floor_bytes_) return idle;
  const int64_t now = BesidesAllocated(use);
  floor_bytes_ = std::min(*floor_bytes_, now);
  return now - *floor_bytes_ >= (idle ? kIdleBytes : kBusyBytes);
}

void TrimRule::Trimmed(const MemoryUse& use) { floor_bytes_ = BesidesAllocated(use); }

std::unique_ptr<PeriodicCheck> GiveFreeMemoryBack(std::function<int64_t()> open_calls) {
  return std::make_unique<PeriodicCheck>(
      kInterval, [open_calls = std::move(open_calls), rule = TrimRule()]() mutable {
        const MemoryUse before = ReadMemoryUse();
        if (before.resident_bytes == 0) return false;  // not known, for want of a descriptor
        if (!rule.Look(before, open_calls())) return false;
        malloc_trim(0);
        const MemoryUse after = ReadMemoryUse();
        if (after.resident_bytes != 0) rule.Trimmed(after);
        spdlog::debug("memory: {} KiB given back, {} KiB resident",
                      (before.resident_bytes - after.resident_bytes) / 1024,
                      after.resident_bytes / 1024);
        return false;
      });
}

}  // namespace flashquant
