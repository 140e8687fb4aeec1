// ParallelFor for off-line work (quantizer, quality tools): threads that live for one call.
//
// Not the backend's thread pool (engine/ must not see kernels/cpu), and not for the serving path.
#pragma once

#include <cstdint>
#include <functional>

namespace flashquant {

// Calls body(begin, end) for ranges of at most `chunk` that together cover [0, count), from up to
// num_threads threads (the caller's included; fewer when the system gives no more), and returns
// when all are done. Which thread gets which range is not fixed: a body must write only to places
// that belong to its range.
void ParallelFor(int num_threads, int64_t count, int64_t chunk,
                 const std::function<void(int64_t begin, int64_t end)>& body);

// The number of CPUs that this process may use, at least 1.
int AvailableThreads();

}  // namespace flashquant
