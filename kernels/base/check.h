// FQ_CHECK and FQ_DCHECK: programmer errors only.
//
// A request, file or flag must never be able to reach one of these; what comes from outside is an
// absl::Status (status_macros.h). FQ_DCHECK vanishes in release builds and is meant for loops.
#pragma once

#include <cstdio>
#include <cstdlib>

#define FQ_CHECK(condition)                                                              \
  do {                                                                                   \
    if (!(condition)) [[unlikely]] {                                                     \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

#ifdef NDEBUG
#define FQ_DCHECK(condition) \
  do {                       \
    if (false) {             \
      (void)(condition);     \
    }                        \
  } while (false)
#else
#define FQ_DCHECK(condition) FQ_CHECK(condition)
#endif
