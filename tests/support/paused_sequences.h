// PausedSequences: pauses sequences of a scheduler as the engine does, and knows which ones. The
// random test and the fuzz target share it.
#pragma once

#include <set>
#include <utility>

#include "engine/scheduler/scheduler.h"

namespace flashquant {

class PausedSequences final {
 public:
  // The scheduler outlives it.
  explicit PausedSequences(Scheduler* scheduler) : scheduler_(scheduler) {}

  // Pauses it, or lets it go on. Only what has been scheduled can have a full stream: a sequence
  // that waits stays as it is (false). `id` is alive.
  bool Toggle(SequenceId id) {
    if (scheduler_->Find(id)->state == SequenceState::kWaiting) return false;
    const bool paused = ids_.insert(id).second;
    if (!paused) ids_.erase(id);
    scheduler_->SetPaused(id, paused);
    return true;
  }
  void ResumeAll() {
    for (const SequenceId id : std::exchange(ids_, {})) scheduler_->SetPaused(id, false);
  }
  // Its end.
  void Forget(SequenceId id) { ids_.erase(id); }
  bool contains(SequenceId id) const { return ids_.contains(id); }
  const std::set<SequenceId>& ids() const { return ids_; }

 private:
  Scheduler* const scheduler_;
  std::set<SequenceId> ids_;
};

}  // namespace flashquant
