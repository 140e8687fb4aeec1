// The pretended model and its checks of every plan.
#include "tests/support/fake_step_runner.h"

#include <stdexcept>
#include <utility>

#include "fmt/format.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

namespace {

uint64_t AddToContext(uint64_t context, int32_t token) {
  context = (context ^ static_cast<uint64_t>(token)) * 1099511628211u;
  return context ^ context >> 29;
}

}  // namespace

int32_t FakeModel::NextToken(std::span<const int32_t> tokens, uint64_t seed) const {
  uint64_t hash = 1469598103934665603u ^ (seed * 0x9e3779b97f4a7c15u);
  for (int32_t token : tokens) hash = AddToContext(hash, token);
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

OutputLogprobs FakeModel::Logprobs(int32_t token_id, int32_t num_top) {
  const auto logprob = [](int32_t id) { return TokenLogprob{id, -0.25f * static_cast<float>(id)}; };
  OutputLogprobs logprobs = {.chosen = logprob(token_id)};
  for (int32_t i = 0; i < num_top; ++i) logprobs.top.push_back(logprob(i));
  return logprobs;
}

FakeStepRunner::FakeStepRunner(int32_t num_blocks, int32_t block_tokens, FakeModel model)
    : num_blocks_(num_blocks),
      block_tokens_(block_tokens),
      model_(model),
      slots_(static_cast<size_t>(num_blocks * block_tokens)) {}

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

FakeStepRunner::BlockUse FakeStepRunner::CheckBlocks(const StepPlan& plan) {
  BlockUse use;
  for (const SequenceStep& step : plan.sequences) {
    const auto first_written = static_cast<size_t>(step.first_position / block_tokens_);
    for (size_t i = 0; i < step.block_ids.size(); ++i) {
      use.readers[step.block_ids[i]].insert(step.id);
      if (i >= first_written) use.writers.emplace(step.block_ids[i], step.id);
    }
  }
  const auto check = [this](const BlockUse& writing, const BlockUse& reading, const char* what) {
    for (const auto& [block, writer] : writing.writers) {
      const auto readers = reading.readers.find(block);
      if (readers == reading.readers.end()) continue;
      for (SequenceId reader : readers->second) {
        if (reader != writer) Violate(fmt::format("block {} of {} is {}", block, reader, what));
      }
    }
  };
  check(use, use, "written by another sequence of the step");
  for (const InFlight& earlier : in_flight_) {
    check(use, earlier.blocks, "written by a later step while the one in flight may read it");
    check(earlier.blocks, use, "given to it while the step in flight writes it for another");
  }
  return use;
}

void FakeStepRunner::WriteSlots(const SequenceStep& step) {
  uint64_t context = 0;
  if (step.first_position > 0) {
    const int32_t before = SlotOf(step, step.first_position - 1);
    if (before < 0)
      return Violate(fmt::format("sequence {} has no block before its step", step.id));
    context = slots_[static_cast<size_t>(before)].context;
  }
  const auto count = static_cast<int32_t>(step.token_ids.size());
  for (int32_t i = 0; i < count; ++i) {
    int32_t token = step.token_ids[static_cast<size_t>(i)];
    if (step.previous_row >= 0 && i + 1 == count) {
      if (static_cast<size_t>(step.previous_row) >= previous_tokens_.size()) {
        return Violate("previous_row out of range");
      }
      token = previous_tokens_[static_cast<size_t>(step.previous_row)];
    }
    const int32_t slot = SlotOf(step, step.first_position + i);
    if (slot < 0) {
      return Violate(fmt::format("sequence {} has no block for position {}", step.id,
                                 step.first_position + i));
    }
    context = AddToContext(context, token);
    slots_[static_cast<size_t>(slot)] = {token, context};
  }
}

std::vector<int32_t> FakeStepRunner::ReadContext(const SequenceStep& step) {
  std::vector<int32_t> tokens;
  uint64_t context = 0;
  const auto end = step.first_position + static_cast<int32_t>(step.token_ids.size());
  for (int32_t position = 0; position < end; ++position) {
    const int32_t slot = SlotOf(step, position);
    if (slot < 0) break;  // seen when it was written
    const Slot& held = slots_[static_cast<size_t>(slot)];
    context = AddToContext(context, held.token);
    if (held.context != context) {
      Violate(fmt::format("sequence {} reads a slot at {} written behind other tokens", step.id,
                          position));
    }
    tokens.push_back(held.token);
  }
  return tokens;
}

void FakeStepRunner::CheckCounts(const SequenceStep& step, std::span<const int32_t> context) {
  const SamplingParams& sampling = *step.sampling;
  const size_t num_prompt_tokens = context.size() - static_cast<size_t>(step.output_position);
  std::map<int32_t, int32_t> expected;
  for (size_t i = 0; i < context.size() && sampling.NeedsTokenCounts(); ++i) {
    if (i >= num_prompt_tokens) {
      ++expected[context[i]];
    } else if (sampling.repetition_penalty != 1.0f) {
      expected.try_emplace(context[i], 0);
    }
  }
  std::map<int32_t, int32_t> planned;
  for (const TokenCount& count : step.token_counts) planned[count.token_id] = count.num_outputs;
  if (planned != expected || planned.size() != step.token_counts.size()) {
    Violate(fmt::format("sequence {}: token counts are not those of its tokens", step.id));
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
  BlockUse blocks = CheckBlocks(plan);
  for (const SequenceStep& step : plan.sequences) {
    WriteSlots(step);
    if (!step.samples) continue;
    const std::vector<int32_t> context = ReadContext(step);
    SampledToken token;
    token.id = step.id;
    token.token_id = model_.NextToken(context, step.sampling->seed);
    token.non_finite = non_finite_ && non_finite_(step);
    if (token.non_finite) token.token_id = 0;
    CheckCounts(step, context);
    if (step.sampling->top_logprobs.has_value()) {
      token.logprobs = FakeModel::Logprobs(token.token_id, *step.sampling->top_logprobs);
    }
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
