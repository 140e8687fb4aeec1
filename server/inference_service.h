// The gRPC service: flashquant.v1.InferenceService over the callback API, and the answer to every
// method that does not exist.
//
// Handlers check, tokenise (bounded), submit and return a reactor; they never wait.
#pragma once

#include "flashquant/v1/inference_service.grpc.pb.h"
#include "grpcpp/generic/async_generic_service.h"
#include "server/generate_reactor.h"

namespace flashquant {

class InferenceService final : public v1::InferenceService::CallbackService {
 public:
  explicit InferenceService(const CallEnvironment& environment) : environment_(environment) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* GenerateText(grpc::CallbackServerContext* context,
                                         const v1::GenerateTextRequest* request,
                                         v1::GenerateTextResponse* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;

 private:
  const CallEnvironment environment_;
};

// Counts unknown methods and services under one label and answers UNIMPLEMENTED.
class UnknownMethods final : public grpc::CallbackGenericService {
 public:
  explicit UnknownMethods(const CallEnvironment& environment) : environment_(environment) {}
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;

 private:
  const CallEnvironment environment_;
};

}  // namespace flashquant
