// The pretended model and its checks of every plan.
#include "tests/support/fake_step_runner.h"

#include <stdexcept>
#include <utility>

#include "fmt/format.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

int32_t FakeModel::NextToken(std::span<const int32_t> tokens, uint64_t seed) const {
  uint64_t hash = 1469598103934665603u ^ (seed * 0x9e3779b97f4a7c15u);
  for (int32_t token : tokens) {
    hash = (hash ^ static_cast<uint64_t>(token)) * 1099511628211u;
    hash ^= hash >> 29;
  }
  return static_cast<int32_t>(hash % static_cast<uint64_t>(vocab_size));
}

std::vector<int32_t> FakeModel::Answer(std::vector<int32_t> prompt, uint64_t seed,
                                       int max_output_tokens) const {
  std::vector<int32_t> output;
  for (int i = 0; i < max_output_tokens; ++i) {
    output.push_back(NextToken(prompt, seed));
    prompt.push_back(output.back());
  }
  return output;
}

FakeStepRunner::FakeStepRunner(int32_t num_blocks, int32_t block_tokens, FakeModel model)
    : num_blocks_(num_blocks),
      block_tokens_(block_tokens),
      model_(model),
      slots_(static_cast<size_t>(num_blocks * block_tokens), -1),
      owners_(slots_.size(), -1) {}

void FakeStepRunner::Violate(std::string text) {
  if (violation_.empty()) violation_ = fmt::format("step {}: {}", num_launched_, text);
}

int32_t FakeStepRunner::SlotOf(const SequenceStep& step, int32_t position) const {
  const auto block = static_cast<size_t>(position / block_tokens_);
  if (block >= step.block_ids.size()) return -1;
  const int32_t id = step.block_ids[block];
  if (id <= 0 || id >= num_blocks_) return -1;
  return id * block_tokens_ + position % block_tokens_;
}

void FakeStepRunner::CheckBlocks(const StepPlan& plan, std::map<int32_t, SequenceId>* blocks) {
  for (const SequenceStep& step : plan.sequences) {
    for (int32_t id : step.block_ids) {
      if (!blocks->emplace(id, step.id).second) Violate(fmt::format("block {} in two tables", id));
      for (const InFlight& earlier : in_flight_) {
        const auto found = earlier.blocks.find(id);
        if (found == earlier.blocks.end() || found->second == step.id) continue;
        Violate(fmt::format("block {} given to {} while a step in flight writes it for {}", id,
                            step.id, found->second));
      }
    }
  }
}

absl::Status FakeStepRunner::Launch(const StepPlan& plan) {
  ++num_launched_;
  if (on_launch_) on_launch_(plan);
  if (num_launched_ == throw_in_launch_) throw std::runtime_error("injected exception");
  if (num_launched_ == fail_launch_) return InternalError("injected launch failure");
  if (in_flight_.size() >= 2) Violate("three steps in flight");

  StepResult result;
  std::vector<int32_t> sampled;
  std::map<int32_t, SequenceId> blocks;
  CheckBlocks(plan, &blocks);
  for (const SequenceStep& step : plan.sequences) {
    const auto count = static_cast<int32_t>(step.token_ids.size());
    for (int32_t i = 0; i < count; ++i) {
      int32_t token = step.token_ids[static_cast<size_t>(i)];
      if (step.previous_row >= 0 && i + 1 == count) {
        if (static_cast<size_t>(step.previous_row) >= previous_tokens_.size()) {
          Violate("previous_row out of range");
          continue;
        }
        token = previous_tokens_[static_cast<size_t>(step.previous_row)];
      }
      const int32_t slot = SlotOf(step, step.first_position + i);
      if (slot < 0) {
        Violate(fmt::format("sequence {} has no block for position {}", step.id,
                            step.first_position + i));
        continue;
      }
      slots_[static_cast<size_t>(slot)] = token;
      owners_[static_cast<size_t>(slot)] = step.id;
    }
    if (!step.samples) continue;
    std::vector<int32_t> context;
    for (int32_t position = 0; position < step.first_position + count; ++position) {
      const int32_t slot = SlotOf(step, position);
      if (slot < 0 || owners_[static_cast<size_t>(slot)] != step.id) {
        Violate(fmt::format("sequence {} reads a slot that is not its own", step.id));
        break;
      }
      context.push_back(slots_[static_cast<size_t>(slot)]);
    }
    SampledToken token;
    token.id = step.id;
    token.token_id = model_.NextToken(context, step.sampling->seed);
    token.non_finite = non_finite_ && non_finite_(step);
    if (token.non_finite) token.token_id = 0;
    sampled.push_back(token.token_id);
    result.tokens.push_back(token);
  }
  previous_tokens_ = std::move(sampled);
  in_flight_.push_back({std::move(result), std::move(blocks)});
  return absl::OkStatus();
}

absl::StatusOr<StepResult> FakeStepRunner::Collect() {
  {
    MutexLock lock(&mu_);
    while (gate_closed_) {
      at_gate_ = true;
      gate_changed_.NotifyAll();
      gate_changed_.Wait(&mu_);
    }
    at_gate_ = false;
  }
  ++num_collected_;
  if (num_collected_ == fail_collect_) return InternalError("injected collect failure");
  if (in_flight_.empty()) return InternalError("nothing was launched");
  StepResult result = std::move(in_flight_.front().result);
  in_flight_.pop_front();
  return result;
}

void FakeStepRunner::CloseGate() {
  MutexLock lock(&mu_);
  gate_closed_ = true;
}

void FakeStepRunner::OpenGate() {
  MutexLock lock(&mu_);
  gate_closed_ = false;
  gate_changed_.NotifyAll();
}

void FakeStepRunner::WaitUntilAtGate() {
  MutexLock lock(&mu_);
  while (!at_gate_) gate_changed_.Wait(&mu_);
}

}  // namespace flashquant
