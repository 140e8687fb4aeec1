// Proto <-> engine types: prompt to ids, effective sampling values, limits that depend on the
// prompt's length, and the messages of the stream.
//
// The checks that need no tokenizer are in request_validation.h and come first. No gRPC here, no
// clock and no I/O: the caller gives the time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/request.h"
#include "engine/tokenizer/tokenizer.h"
#include "flashquant/v1/inference.pb.h"
#include "server/request_error.h"
#include "server/request_validation.h"

namespace flashquant {

// Formats a conversation for the model; INVALID_ARGUMENT for an order its format does not allow.
using ChatEncoder = std::function<absl::StatusOr<std::vector<int32_t>>(const v1::ChatPrompt& chat)>;

struct MapperOptions {
  RequestLimits limits;
  std::string revision;                  // of the model, for Accepted
  const Tokenizer* tokenizer = nullptr;  // may be null: token ids only
  ChatEncoder encode_chat;               // may be empty: no chat
  std::vector<int32_t> eos_token_ids;    // the model's end tokens
  SamplingParams defaults;               // for unset fields; the seed is always drawn
  Duration max_request_duration{};       // a call runs at most this long
  Duration default_queue_timeout{};      // 0 = none
  std::function<uint64_t()> random;      // seeds and request ids
};

// When the call came and when its client gives up.
struct CallTimes {
  TimePoint now{};
  std::optional<TimePoint> client_deadline;
};

// What the delivery needs besides the engine's request.
struct OutputSettings {
  bool omit_text = false;
  bool token_ids = false;
  int32_t tokens_per_message = 0;  // 0 = as they come
};

struct MappedRequest {
  GenerateRequest request;
  OutputSettings output;
};

// Immutable; any thread.
class RequestMapper final {
 public:
  explicit RequestMapper(MapperOptions options);

  const MapperOptions& options() const { return options_; }

  // The prompt's ids. `request` must have passed ValidateGenerate. EMPTY_PROMPT when the text gives
  // no token besides BOS; CHAT_INVALID.
  std::optional<RequestError> EncodePrompt(const v1::GenerateRequest& request,
                                           std::vector<int32_t>* prompt_tokens) const;

  // The engine's request. CONTEXT_LENGTH_EXCEEDED when prompt and asked output do not fit;
  // DEADLINE_EXCEEDED when the client's deadline has passed. `request` must have passed
  // ValidateGenerate.
  std::optional<RequestError> Build(const v1::GenerateRequest& request,
                                    std::vector<int32_t> prompt_tokens, const CallTimes& times,
                                    MappedRequest* mapped) const;

  v1::Accepted MakeAccepted(const GenerateRequest& request) const;

 private:
  SamplingParams EffectiveSampling(const v1::SamplingParams& sampling) const;

  const MapperOptions options_;
};

// DEADLINE_EXCEEDED when `times.client_deadline` has passed; to be asked before tokenizing. So it
// has when a millisecond or less is left: a timeout that has run out already travels as the least
// one that there is, and gRPC reads that as one millisecond from now.
std::optional<RequestError> CheckDeadline(const CallTimes& times);

// Whether a client that cancels at `now` does so because its deadline has passed. The client resets
// the call when its own timer ends, which is before `deadline`: that counts from the moment when
// the call arrived here, and the timeout was rounded up to two or three digits on the way.
bool CancelIsDeadline(TimePoint arrival, TimePoint deadline, TimePoint now);

// `event.status` must be OK; `stop` is the request's.
v1::Finished MakeFinished(const FinishedEvent& event, const StopConditions& stop);

// Rounds down to nanoseconds; negative durations become 0.
google::protobuf::Duration ToProtoDuration(Duration duration);

// `random` in 16 hex digits.
std::string MakeRequestId(uint64_t random);

}  // namespace flashquant
