// What a scheduler may do, told again without one: who is before whom, what each KV block holds,
// and which contents may be shared. Kept by a test beside the scheduler and held against its plans.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/scheduler/step_plan.h"

namespace flashquant {

// A request as the reference knows it: its answer is known beforehand.
struct ReferenceRequest {
  std::vector<int32_t> tokens;  // prompt and whole answer
  size_t num_prompt_tokens = 0;
  std::string salt;
  int priority = 0;
  int64_t arrival_ms = 0;
  int64_t patience_us_per_token = 0;
  int32_t num_cached = 0;  // of the prompt, when it is added
};

// Times are in milliseconds.
class SchedulerReference {
 public:
  SchedulerReference(int32_t block_tokens, int64_t ageing_ms)
      : block_tokens_(static_cast<size_t>(block_tokens)), ageing_ms_(ageing_ms) {}

  void Add(SequenceId id, ReferenceRequest request) { requests_.emplace(id, std::move(request)); }
  // What the scheduler found in its cache of the prompt of `id`, which was just added. Returns what
  // is wrong with it; empty: nothing. `exact`: the cache keeps everything.
  std::string NoteCached(SequenceId id, int32_t num_cached, bool exact) {
    ReferenceRequest& request = requests_.at(id);
    request.num_cached = num_cached;
    const int32_t most = MostCached(id, static_cast<int32_t>(request.num_prompt_tokens));
    if (num_cached > most) return "more than was ever computed";
    return exact && num_cached < most ? "less than the cache has" : "";
  }
  void Remove(SequenceId id) { requests_.erase(id); }

  // Whether `a` comes before `b`.
  bool Before(SequenceId a, SequenceId b) const {
    const auto key = [this](SequenceId id) {
      const ReferenceRequest& request = requests_.at(id);
      const auto to_compute = static_cast<int64_t>(request.num_prompt_tokens) - request.num_cached;
      const int64_t patience_us =
          std::min(request.patience_us_per_token * to_compute, ageing_ms_ * 1000 / 2);
      return std::pair((request.arrival_ms - request.priority * ageing_ms_) * 1000 + patience_us,
                       id);
    };
    return key(a) < key(b);
  }

  // Tokens of the first `num_tokens` of `id` that a cache which keeps everything has.
  int32_t MostCached(SequenceId id, int32_t num_tokens) const {
    size_t blocks = 0;
    const size_t most = (static_cast<size_t>(num_tokens) - 1) / block_tokens_;
    while (blocks < most && finite_.contains(Key(id, blocks + 1))) ++blocks;
    return static_cast<int32_t>(blocks * block_tokens_);
  }

  // What is wrong with how this part of a plan uses the blocks; empty: nothing. `from_cache`: what
  // is before it was not computed by this sequence, so it must have been finite.
  std::string CheckStep(const SequenceStep& step, bool from_cache) const {
    const size_t num_before = static_cast<size_t>(step.first_position) / block_tokens_;
    if (from_cache && static_cast<size_t>(step.first_position) % block_tokens_ != 0) {
      return "begins within a block";
    }
    for (size_t i = 0; i < num_before; ++i) {
      const auto held = contents_.find(step.block_ids[i]);
      const Contents key = Key(step.id, i + 1);
      if (held == contents_.end() || held->second != key) return "a block holds something else";
      if (from_cache && !finite_.contains(key)) return "a block was shared before it was finite";
    }
    return "";
  }
  // The step is launched: its blocks are written.
  void Write(const SequenceStep& step) {
    const auto end = static_cast<size_t>(step.first_position) + step.token_ids.size();
    for (size_t i = static_cast<size_t>(step.first_position) / block_tokens_;
         i < step.block_ids.size(); ++i) {
      if ((i + 1) * block_tokens_ <= end) {
        contents_[step.block_ids[i]] = Key(step.id, i + 1);
      } else {
        contents_.erase(step.block_ids[i]);
      }
    }
  }
  // A row of `id` that has seen `num_tokens` tokens was committed, finite or not.
  void Commit(SequenceId id, int32_t num_tokens, bool finite) {
    const size_t num_full = static_cast<size_t>(num_tokens) / block_tokens_;
    if (finite) {
      for (size_t n = 1; n <= num_full; ++n) finite_.insert(Key(id, n));
    } else if (num_full > 0) {
      const Contents first = Key(id, 1);
      std::erase_if(finite_, [&](const Contents& key) {
        return key.first == first.first && key.second.size() >= first.second.size() &&
               std::equal(first.second.begin(), first.second.end(), key.second.begin());
      });
    }
  }
  void Clear() { finite_.clear(); }

 private:
  using Contents = std::pair<std::string, std::vector<int32_t>>;  // salt; all tokens up to the end

  Contents Key(SequenceId id, size_t num_blocks) const {
    const ReferenceRequest& request = requests_.at(id);
    const auto end = static_cast<ptrdiff_t>(num_blocks * block_tokens_);
    return {request.salt, {request.tokens.begin(), request.tokens.begin() + end}};
  }

  const size_t block_tokens_;
  const int64_t ageing_ms_;
  std::map<SequenceId, ReferenceRequest> requests_;
  std::map<int32_t, Contents> contents_;  // of full blocks
  std::set<Contents> finite_;
};

}  // namespace flashquant
