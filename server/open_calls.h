// OpenCalls: the accepted requests by their ids, for AdminService: what it may show of each, and a
// way to cancel it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/clock.h"
#include "engine/request_stream.h"
#include "kernels/base/mutex.h"

namespace flashquant {

struct OpenCall {
  std::string request_id;
  int32_t priority = 0;
  int64_t prompt_tokens = 0;
  int64_t max_output_tokens = 0;
  int64_t undelivered_tokens = 0;
  TimePoint arrival{};
};

// Any thread. Streams that nobody else holds any more are forgotten by themselves.
class OpenCalls final {
 public:
  void Add(OpenCall call, const std::shared_ptr<RequestStream>& stream);
  // Oldest first, at most `limit`.
  std::vector<OpenCall> List(size_t limit);
  // False when no open request has this id.
  bool Cancel(const std::string& request_id);

 private:
  struct Entry {
    OpenCall call;
    std::weak_ptr<RequestStream> stream;
  };
  void Prune() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mu_);
  size_t prune_at_ ABSL_GUARDED_BY(mu_) = 64;
};

}  // namespace flashquant
