// Ranges are handed out by one atomic counter.
#include "engine/quantize/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/base/math_util.h"

namespace flashquant {

void ParallelFor(int num_threads, int64_t count, int64_t chunk,
                 const std::function<void(int64_t begin, int64_t end)>& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (;;) {
      const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) return;
      body(begin, std::min(begin + chunk, count));
    }
  };
  const int64_t useful = std::min<int64_t>(num_threads, CeilDiv(count, chunk));
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < useful; ++i) {
    try {
      helpers.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // no thread to be had: the caller's own does the rest
    }
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

int AvailableThreads() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace flashquant
