// A library to be preloaded: the wall clock jumps by a day, forwards and back, twice a second. The
// monotonic clock is left alone.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

extern "C" int clock_gettime(clockid_t id, timespec* now) {
  const long result = syscall(SYS_clock_gettime, id, now);
  if (result != 0 || (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE)) {
    return static_cast<int>(result);
  }
  timespec steady{};
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &steady);
  const long half_seconds = 2 * steady.tv_sec + (steady.tv_nsec >= 500'000'000 ? 1 : 0);
  constexpr long kDay = 86400;
  now->tv_sec += (half_seconds % 3 - 1) * kDay;
  return 0;
}
