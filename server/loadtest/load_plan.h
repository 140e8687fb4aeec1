// LoadPlan: what a load test sends and when, decided before the first call: lengths, prompts and
// intended times. Pure: the same options and files give the same plan.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace flashquant {

// One request of a trace: seconds since its first one, lengths in tokens.
struct TraceEntry {
  double seconds = 0;
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
};

// Reads a CSV of "TIMESTAMP,ContextTokens,GeneratedTokens" with a header line and times like
// "2023-11-16 18:17:03.9799600" or plain seconds (the form of Azure's public LLM traces). Sorted by
// time. DATA_LOSS with the line for anything else; at most 10 million lines.
absl::StatusOr<std::vector<TraceEntry>> ParseTrace(std::string_view csv);

// Reads one prompt a line from JSON Lines: the text under "prompt", "text" or "question", or the
// first of "turns". DATA_LOSS with the line for anything else.
absl::StatusOr<std::vector<std::string>> ParsePrompts(std::string_view lines);

// One call to be made. Exactly one of `text` and `token_ids` is set.
struct PlannedRequest {
  double seconds = 0;  // intended time since the start of the run; 0 in a closed loop
  std::string text;
  std::vector<uint32_t> token_ids;
  uint32_t max_output_tokens = 0;
};

struct LoadPlanOptions {
  double rate = 0;  // requests a second; 0 = the trace's own times, or a closed loop
  double duration_seconds = 30;
  bool uniform_arrivals = false;  // evenly spaced instead of Poisson; not with a trace
  bool closed_loop = false;       // times do not matter: requests go out as others end
  int64_t input_tokens = 64;      // without a trace and without prompts
  int64_t output_tokens = 64;     // without a trace
  uint64_t seed = 1;
  uint32_t context_tokens = 0;   // of the model
  uint32_t vocabulary_size = 0;  // of the model; ids of made-up prompts are drawn below it
};

// What the lengths of `trace` are multiplied by so that its longest request fits into
// `context_tokens`; 1 when all fit.
double LengthScale(const std::vector<TraceEntry>& trace, uint32_t context_tokens);

// With a trace and a rate the times are stretched to that mean rate, bursts kept, and the trace
// starts again when the duration is longer. A closed loop gets 4096 requests, to be sent in turn.
// INVALID_ARGUMENT when lengths leave no room in the context or more than 10 million requests
// would come of it.
absl::StatusOr<std::vector<PlannedRequest>> MakeLoadPlan(const LoadPlanOptions& options,
                                                         const std::vector<TraceEntry>& trace,
                                                         const std::vector<std::string>& prompts);

}  // namespace flashquant
