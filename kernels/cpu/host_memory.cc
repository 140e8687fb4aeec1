#include "kernels/cpu/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <string_view>

#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kAlignment = 256;
// From here on memory comes from mmap: its zero pages cost nothing until they are touched.
constexpr int64_t kMapThreshold = int64_t{4} << 20;

// The first number in the file, -1 when there is none ("max", or no such file).
int64_t ReadNumber(const char* path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return -1;
  int64_t value = -1;
  std::from_chars(word.data(), word.data() + word.size(), value);
  return value;
}

// The number after `key` in a file of "key number" lines, `fallback` when there is none.
int64_t ReadKey(const char* path, std::string_view key, int64_t fallback) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    int64_t value = 0;
    if (word == key && file >> value) return value;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return fallback;
}

}  // namespace

int64_t FreeHostMemoryBytes() {
  int64_t free_bytes = ReadKey("/proc/meminfo", "MemAvailable:", int64_t{1} << 20) * 1024;
  const int64_t limit = ReadNumber("/sys/fs/cgroup/memory.max");
  const int64_t used = ReadNumber("/sys/fs/cgroup/memory.current");
  if (limit >= 0 && used >= 0) {
    // What the group uses includes the page cache of files just read, which is given back on
    // demand.
    const int64_t cache = ReadKey("/sys/fs/cgroup/memory.stat", "inactive_file", 0);
    free_bytes = std::min(free_bytes, std::max<int64_t>(0, limit - used + cache));
  }
  return free_bytes;
}

absl::StatusOr<void*> AllocateHostMemory(int64_t num_bytes) {
  if (num_bytes < 0) return InvalidArgumentError("allocation of {} bytes", num_bytes);
  if (num_bytes == 0) return nullptr;
  if (num_bytes >= kMapThreshold) {
    // Over-commit would grant the pages and kill the process when they are touched.
    const int64_t free_bytes = FreeHostMemoryBytes();
    if (num_bytes > free_bytes) {
      return ResourceExhaustedError("host memory: {} bytes wanted, {} bytes free", num_bytes,
                                    free_bytes);
    }
    void* data = mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return ResourceExhaustedError("host memory: the system refused {} bytes", num_bytes);
    }
    madvise(data, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
    return data;
  }
  const auto rounded = static_cast<size_t>(RoundUp(num_bytes, kAlignment));
  void* data = std::aligned_alloc(static_cast<size_t>(kAlignment), rounded);
  if (data == nullptr) {
    return ResourceExhaustedError("host memory: the system refused {} bytes", num_bytes);
  }
  std::memset(data, 0, rounded);
  return data;
}

void FreeHostMemory(void* data, int64_t num_bytes) {
  if (data == nullptr) return;
  if (num_bytes >= kMapThreshold) {
    munmap(data, static_cast<size_t>(num_bytes));
  } else {
    std::free(data);
  }
}

absl::StatusOr<HostMemory> HostMemory::Create(int64_t num_bytes) {
  FQ_ASSIGN_OR_RETURN(void* data, AllocateHostMemory(num_bytes));
  HostMemory memory;
  memory.data_ = data;
  memory.num_bytes_ = num_bytes;
  return memory;
}

}  // namespace flashquant
