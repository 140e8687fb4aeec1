// Request validation (target F8). Input: a byte of limits, then the bytes of a GenerateRequest.
//
// Properties: no crash; an accepted request has every value in its range; a refused one has at
// least one violation, and each names a field that the message has; a message has no more objects
// than were counted before it was parsed.
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "server/field_count.h"
#include "server/request_validation.h"
#include "server/status_mapping.h"
#include "server/utf8.h"
#include "tests/fuzz/fuzz_input.h"

namespace flashquant {
namespace {

constexpr int kVocabulary = 100;

// "stop.sequences[3]", "prompt.token_ids[0]" (of the oneof), "field 12" (a reserved number).
bool FieldExists(std::string_view path) {
  if (path.starts_with("field ")) return true;
  const google::protobuf::Descriptor* message = v1::GenerateRequest::descriptor();
  while (!path.empty()) {
    std::string_view part = TakeUntil('.', &path);
    part = part.substr(0, part.find('['));
    if (message == nullptr) return false;
    const std::string name(part);
    if (message->FindOneofByName(name) != nullptr) continue;
    const google::protobuf::FieldDescriptor* field = message->FindFieldByName(name);
    if (field == nullptr) return false;
    message = field->message_type();
  }
  return true;
}

bool Within(double value, double low, double high) { return value >= low && value <= high; }

void CheckPrompt(const v1::GenerateRequest& request) {
  Require(request.prompt_case() != v1::GenerateRequest::PROMPT_NOT_SET, "no prompt accepted");
  if (request.has_text()) {
    Require(!request.text().empty() && request.text().size() <= 1 << 20, "text's size");
    Require(!FindInvalidUtf8(request.text()), "text is not UTF-8");
  }
  if (request.has_token_ids()) {
    Require(request.token_ids().ids_size() > 0, "no ids accepted");
    for (const uint32_t id : request.token_ids().ids()) Require(id < kVocabulary, "prompt id");
  }
}

void CheckSampling(const v1::SamplingParams& sampling) {
  if (sampling.has_temperature()) Require(Within(sampling.temperature(), 0, 2), "temperature");
  if (sampling.has_top_p()) {
    Require(sampling.top_p() > 0 && Within(sampling.top_p(), 0, 1), "top_p");
  }
  if (sampling.has_min_p()) Require(Within(sampling.min_p(), 0, 1), "min_p");
  Require(sampling.top_k() <= kVocabulary, "top_k");
  if (sampling.has_repetition_penalty()) {
    Require(
        std::isnormal(sampling.repetition_penalty()) && Within(sampling.repetition_penalty(), 0, 2),
        "repetition_penalty");
  }
  Require(Within(sampling.presence_penalty(), -2, 2), "presence_penalty");
  Require(Within(sampling.frequency_penalty(), -2, 2), "frequency_penalty");
  Require(sampling.logit_bias_size() <= 64, "number of biases");
  for (const v1::LogitBias& entry : sampling.logit_bias()) {
    Require(entry.token_id() < kVocabulary && Within(entry.bias(), -100, 100), "bias");
  }
}

void CheckAccepted(const v1::GenerateRequest& request) {
  Require(request.model().empty() || request.model() == "m", "model");
  Require(request.request_id().empty() || IsValidRequestId(request.request_id()), "request_id");
  CheckPrompt(request);
  CheckSampling(request.sampling());
  const v1::StopConditions& stop = request.stop();
  if (stop.has_max_output_tokens()) {
    Require(stop.max_output_tokens() >= 1, "max_output_tokens");
    Require(stop.min_output_tokens() <= stop.max_output_tokens(), "min_output_tokens");
  }
  Require(stop.sequences_size() <= 8 && stop.token_ids_size() <= 32, "number of stops");
  for (const std::string& text : stop.sequences()) {
    Require(!text.empty() && text.size() <= 128 && !FindInvalidUtf8(text), "stop sequence");
  }
  for (const uint32_t id : stop.token_ids()) Require(id < kVocabulary, "stop token");
  Require(request.output().top_logprobs() <= 20, "top_logprobs");
  Require(request.output().tokens_per_message() <= 256, "tokens_per_message");
  Require(Within(request.priority(), -10, 10), "priority");
  Require(request.cache_salt().size() <= 64, "cache_salt");
  Require(Within(static_cast<double>(request.queue_timeout().seconds()), 0, 86400) &&
              Within(request.queue_timeout().nanos(), 0, 999999999),
          "queue_timeout");
}

void CheckRefused(const RequestError& error) {
  if (error.code == absl::StatusCode::kNotFound) return;  // the model's name
  Require(!error.violations.empty() && !error.reason.empty(), "refused without a violation");
  for (const FieldViolation& violation : error.violations) {
    Require(FieldExists(violation.field), "no such field: " + violation.field);
    Require(!violation.description.empty(), "violation without a description");
  }
  // What a client gets fits the 8 KiB that gRPC allows for metadata.
  Require(ToRpcStatus(error).ByteSizeLong() < 4096, "details are too large");
}

int NumObjects(const v1::GenerateRequest& request) {
  return request.chat().messages_size() + request.sampling().logit_bias_size() +
         request.stop().sequences_size() +
         request.GetReflection()->GetUnknownFields(request).field_count();
}

void RunOne(FuzzInput input) {
  const uint8_t flags = input.Byte();
  RequestLimits limits;
  limits.model_name = "m";
  limits.vocab_size = kVocabulary;
  limits.context_length = 64;
  limits.has_tokenizer = (flags & 1u) != 0;
  limits.has_chat_format = (flags & 2u) != 0;
  const std::string_view bytes = input.Rest();
  google::protobuf::io::ArrayInputStream counted(bytes.data(), static_cast<int>(bytes.size()));
  const int limit = flags >> 2;
  const bool too_many = HasTooManyFields(v1::GenerateRequest::descriptor(), &counted, limit);
  v1::GenerateRequest request;
  if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  Require(too_many || NumObjects(request) <= limit, "more objects than were counted");
  if (const std::optional<RequestError> error = ValidateGenerate(request, limits)) {
    CheckRefused(*error);
  } else {
    CheckAccepted(request);
  }
}

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::RunOne({data, size});
  return 0;
}
