// One function per method.
#include "server/inference_service.h"

#include <optional>
#include <string>

#include "engine/tokenizer/incremental_detokenizer.h"
#include "server/request_validation.h"
#include "server/status_mapping.h"

namespace flashquant {
namespace {

// Runs a method that needs no engine: `validate` gives the error, `answer` fills the response.
template <typename Validate, typename Answer>
grpc::ServerUnaryReactor* RunUnary(const CallEnvironment& environment, RpcMethod method,
                                   grpc::CallbackServerContext* context, const Validate& validate,
                                   const Answer& answer) {
  CallCounter counter(environment, method);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  RequestError not_serving;
  const ServingModel* model = environment.submitter->Model(&not_serving);
  std::optional<RequestError> error =
      model == nullptr ? std::optional(not_serving) : validate(*model);
  if (!error) {
    answer(*model);
    reactor->Finish(grpc::Status::OK);
  } else {
    counter.set_code(error->code);
    reactor->Finish(FinishStatus(*error, context));
  }
  return reactor;
}

class RefusingReactor final : public grpc::ServerGenericBidiReactor {
 public:
  explicit RefusingReactor(const CallEnvironment& environment)
      : counter_(environment, RpcMethod::kOther) {
    counter_.set_code(absl::StatusCode::kUnimplemented);
    Finish(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "unknown method"));
  }
  void OnDone() override { delete this; }

 private:
  ~RefusingReactor() override = default;
  CallCounter counter_;
};

}  // namespace

grpc::ServerWriteReactor<v1::GenerateResponse>* InferenceService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  return GenerateReactor::Start(environment_, context, *request);
}

grpc::ServerUnaryReactor* InferenceService::GenerateText(grpc::CallbackServerContext* context,
                                                         const v1::GenerateTextRequest* request,
                                                         v1::GenerateTextResponse* response) {
  return GenerateTextReactor::Start(environment_, context, *request, response);
}

grpc::ServerUnaryReactor* InferenceService::Tokenize(grpc::CallbackServerContext* context,
                                                     const v1::TokenizeRequest* request,
                                                     v1::TokenizeResponse* response) {
  return RunUnary(
      environment_, RpcMethod::kTokenize, context,
      [&](const ServingModel& model) {
        return ValidateTokenize(*request, model.mapper.options().limits);
      },
      [&](const ServingModel& model) {
        const Tokenizer& tokenizer = *model.mapper.options().tokenizer;
        const std::optional<int32_t> bos = tokenizer.prompt_bos();
        if (request->add_bos() && bos) response->add_token_ids(static_cast<uint32_t>(*bos));
        const std::vector<int32_t> ids = tokenizer.Encode(
            request->text(),
            request->recognise_special() ? SpecialText::kRecognised : SpecialText::kPlain);
        response->mutable_token_ids()->Add(ids.begin(), ids.end());
      });
}

grpc::ServerUnaryReactor* InferenceService::Detokenize(grpc::CallbackServerContext* context,
                                                       const v1::DetokenizeRequest* request,
                                                       v1::DetokenizeResponse* response) {
  return RunUnary(
      environment_, RpcMethod::kDetokenize, context,
      [&](const ServingModel& model) {
        return ValidateDetokenize(*request, model.mapper.options().limits);
      },
      [&](const ServingModel& model) {
        const Tokenizer& tokenizer = *model.mapper.options().tokenizer;
        Utf8Repair repair;
        std::string* text = response->mutable_text();
        for (const uint32_t id : request->token_ids()) {
          repair.Append(tokenizer.TokenBytes(static_cast<int32_t>(id)), text);
        }
        repair.Flush(text);
      });
}

grpc::ServerUnaryReactor* InferenceService::GetModel(grpc::CallbackServerContext* context,
                                                     const v1::GetModelRequest* request,
                                                     v1::GetModelResponse* response) {
  return RunUnary(
      environment_, RpcMethod::kGetModel, context,
      [&](const ServingModel& model) {
        return ValidateGetModel(*request, model.mapper.options().limits);
      },
      [&](const ServingModel& model) { *response = model.info; });
}

grpc::ServerGenericBidiReactor* UnknownMethods::CreateReactor(
    grpc::GenericCallbackServerContext* /*context*/) {
  return new RefusingReactor(environment_);
}

}  // namespace flashquant
