// Entries whose stream is gone are dropped when there may be many of them, so that adding one stays
// cheap.
#include "server/open_calls.h"

#include <algorithm>
#include <utility>

namespace flashquant {

void OpenCalls::Prune() {
  std::erase_if(entries_, [](const auto& entry) { return entry.second.stream.expired(); });
  prune_at_ = std::max<size_t>(64, 2 * entries_.size());
}

void OpenCalls::Add(OpenCall call, const std::shared_ptr<RequestStream>& stream) {
  MutexLock lock(&mu_);
  std::string id = call.request_id;
  entries_.insert_or_assign(std::move(id), Entry{std::move(call), stream});
  if (entries_.size() >= prune_at_) Prune();
}

std::vector<OpenCall> OpenCalls::List(size_t limit) {
  MutexLock lock(&mu_);
  Prune();
  std::vector<OpenCall> calls;
  for (const auto& [id, entry] : entries_) {
    const std::shared_ptr<RequestStream> stream = entry.stream.lock();
    if (stream == nullptr) continue;
    calls.push_back(entry.call);
    calls.back().undelivered_tokens = stream->pending_tokens();
  }
  std::ranges::stable_sort(calls, {}, &OpenCall::arrival);
  if (calls.size() > limit) calls.resize(limit);
  return calls;
}

bool OpenCalls::Cancel(const std::string& request_id) {
  std::shared_ptr<RequestStream> stream;
  {
    MutexLock lock(&mu_);
    const auto found = entries_.find(request_id);
    if (found != entries_.end()) stream = found->second.stream.lock();
  }
  if (stream == nullptr) return false;
  stream->Cancel(CancelReason::kClient);
  return true;
}

}  // namespace flashquant
