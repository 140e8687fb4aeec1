// Every check of a request that needs neither the tokenizer nor the engine: pure, total, all
// violations at once, before anything is allocated for the request.
//
// Limits live in RequestLimits with their defaults. The texts are those of the request matrix
// (reliability rows R1 to R37): field, rule, limit and found value, never the value of a text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flashquant/v1/inference.pb.h"
#include "kernels/base/token_values.h"
#include "server/request_error.h"

namespace flashquant {

// What requests are checked against. The fixed ones are part of the wire contract.
struct RequestLimits {
  static constexpr int64_t kMaxPromptBytes = 1 << 20;
  static constexpr int kMaxRequestIdChars = 64;
  static constexpr int kMaxChatMessages = 1024;
  static constexpr int kMaxStopSequences = 8;
  static constexpr int kMaxStopSequenceBytes = 128;
  static constexpr int kMaxStopTokenIds = 32;
  static constexpr int kMaxLogitBiases = 64;
  static constexpr int kMaxTopLogprobs = flashquant::kMaxTopLogprobs;
  static constexpr int kMaxTokensPerMessage = 256;
  static constexpr int kMaxPriority = 10;
  static constexpr int kMaxCacheSaltBytes = 64;
  static constexpr int64_t kMaxQueueTimeoutSeconds = 86400;
  static constexpr int kMaxDetokenizeIds = 1 << 20;
  // A token may have a hundred bytes; clients take messages of 4 MiB.
  static constexpr size_t kMaxDetokenizedBytes = size_t{3} << 20;
  // Details travel as metadata, which clients limit to 8 KiB: later violations are dropped.
  static constexpr int kMaxReportedViolations = 16;

  std::string model_name;
  int32_t vocab_size = 0;
  int32_t context_length = 0;
  bool has_tokenizer = false;
  bool has_chat_format = false;
  std::string chat_refusal = "this model has no chat format";  // why, when it has none
};

// NOT_FOUND (model), INVALID_ARGUMENT with every violation, else UNIMPLEMENTED naming the first
// field that is not built, else nullopt. Any thread.
std::optional<RequestError> ValidateGenerate(const v1::GenerateRequest& request,
                                             const RequestLimits& limits);
std::optional<RequestError> ValidateTokenize(const v1::TokenizeRequest& request,
                                             const RequestLimits& limits);
// Of ids whose text has more than kMaxDetokenizedBytes.
RequestError TextTooLong();
std::optional<RequestError> ValidateDetokenize(const v1::DetokenizeRequest& request,
                                               const RequestLimits& limits);
std::optional<RequestError> ValidateGetModel(const v1::GetModelRequest& request,
                                             const RequestLimits& limits);

// True when `id` may be a request id: 1..64 letters, digits, '.', '_', '-'.
bool IsValidRequestId(std::string_view id);

}  // namespace flashquant
