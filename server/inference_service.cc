// One function per method.
#include "server/inference_service.h"

#include <optional>
#include <string>

#include "engine/tokenizer/incremental_detokenizer.h"
#include "server/request_validation.h"
#include "server/status_mapping.h"

namespace flashquant {
namespace {

// Runs a method that needs no engine: `validate` gives the error, `answer` fills the response or
// gives one too.
template <typename Request, typename Response>
grpc::ServerUnaryReactor* RunUnary(
    const CallEnvironment& environment, RpcMethod method, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer& request_bytes, grpc::ByteBuffer* response_bytes,
    std::optional<RequestError> (*validate)(const Request&, const RequestLimits&),
    std::optional<RequestError> (*answer)(const Request&, const ServingModel&, Response*)) {
  CallCounter counter(environment, method);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const std::optional<RequestError> error = OrNoMemory([&]() -> std::optional<RequestError> {
    // First: without it nothing of the request is looked at.
    if (auto refusal = CheckCredentials(environment, *context)) return refusal;
    Request request;
    if (!ParseMessage(request_bytes, &request)) return MalformedRequest();
    RequestError not_serving;
    const ServingModel* model = environment.submitter->Model(&not_serving);
    if (model == nullptr) return not_serving;
    if (auto invalid = validate(request, model->mapper.options().limits)) return invalid;
    Response response;
    if (auto too_long = answer(request, *model, &response)) return too_long;
    *response_bytes = SerializeMessage(response);
    return std::nullopt;
  });
  if (error) counter.set_code(error->code);
  reactor->Finish(error ? FinishStatus(*error, context) : grpc::Status::OK);
  return reactor;
}

std::optional<RequestError> AnswerTokenize(const v1::TokenizeRequest& request,
                                           const ServingModel& model,
                                           v1::TokenizeResponse* response) {
  const Tokenizer& tokenizer = *model.mapper.options().tokenizer;
  const std::optional<int32_t> bos = tokenizer.prompt_bos();
  if (request.add_bos() && bos) response->add_token_ids(static_cast<uint32_t>(*bos));
  const std::vector<int32_t> ids = tokenizer.Encode(
      request.text(), request.recognise_special() ? SpecialText::kRecognised : SpecialText::kPlain);
  response->mutable_token_ids()->Add(ids.begin(), ids.end());
  return std::nullopt;
}

std::optional<RequestError> AnswerDetokenize(const v1::DetokenizeRequest& request,
                                             const ServingModel& model,
                                             v1::DetokenizeResponse* response) {
  const Tokenizer& tokenizer = *model.mapper.options().tokenizer;
  Utf8Repair repair;
  std::string* text = response->mutable_text();
  for (const uint32_t id : request.token_ids()) {
    repair.Append(tokenizer.TokenBytes(static_cast<int32_t>(id)), text);
    if (text->size() > RequestLimits::kMaxDetokenizedBytes) return TextTooLong();
  }
  repair.Flush(text);
  return std::nullopt;
}

std::optional<RequestError> AnswerGetModel(const v1::GetModelRequest& /*request*/,
                                           const ServingModel& model,
                                           v1::GetModelResponse* response) {
  *response = model.info;
  return std::nullopt;
}

class RefusingReactor final : public grpc::ServerGenericBidiReactor {
 public:
  RefusingReactor(const CallEnvironment& environment, grpc::GenericCallbackServerContext* context)
      : counter_(environment, RpcMethod::kOther) {
    const std::optional<RequestError> error = CheckCredentials(environment, *context);
    counter_.set_code(error ? error->code : absl::StatusCode::kUnimplemented);
    Finish(error ? FinishStatus(*error, context)
                 : grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "unknown method"));
  }
  void OnDone() override { delete this; }

 private:
  ~RefusingReactor() override = default;
  CallCounter counter_;
};

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* InferenceService::Generate(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  return GenerateReactor::Start(environment_, context, *request);
}

grpc::ServerUnaryReactor* InferenceService::GenerateText(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return GenerateTextReactor::Start(environment_, context, *request, response);
}

grpc::ServerUnaryReactor* InferenceService::Tokenize(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* response) {
  return RunUnary(environment_, RpcMethod::kTokenize, context, *request, response, ValidateTokenize,
                  AnswerTokenize);
}

grpc::ServerUnaryReactor* InferenceService::Detokenize(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  return RunUnary(environment_, RpcMethod::kDetokenize, context, *request, response,
                  ValidateDetokenize, AnswerDetokenize);
}

grpc::ServerUnaryReactor* InferenceService::GetModel(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* response) {
  return RunUnary(environment_, RpcMethod::kGetModel, context, *request, response, ValidateGetModel,
                  AnswerGetModel);
}

grpc::ServerGenericBidiReactor* UnknownMethods::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  return new RefusingReactor(environment_, context);
}

}  // namespace flashquant
