// The gRPC service: flashquant.v1.InferenceService over the callback API, and the answer to every
// method that does not exist.
//
// Handlers check, tokenise (bounded), submit and return a reactor; they never wait.
#pragma once

#include "flashquant/v1/inference_service.grpc.pb.h"
#include "grpcpp/generic/async_generic_service.h"
#include "server/generate_reactor.h"

namespace flashquant {

// Every method takes and gives bytes, see generate_reactor.h.
using RawInferenceService = v1::InferenceService::WithRawCallbackMethod_Generate<
    v1::InferenceService::WithRawCallbackMethod_GenerateText<
        v1::InferenceService::WithRawCallbackMethod_Tokenize<
            v1::InferenceService::WithRawCallbackMethod_Detokenize<
                v1::InferenceService::WithRawCallbackMethod_GetModel<
                    v1::InferenceService::Service>>>>>;

class InferenceService final : public RawInferenceService {
 public:
  explicit InferenceService(const CallEnvironment& environment) : environment_(environment) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* GenerateText(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;

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
