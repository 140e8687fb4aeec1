// InferenceClient: calls of a running server without gRPC in its header: for `flashquant generate`,
// `flashquant health` and the tests.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "flashquant/v1/inference.pb.h"

namespace flashquant {

// The status of a call, with its google.rpc details taken apart.
struct CallResult {
  int code = 0;  // gRPC status code, 0 = OK
  std::string message;
  std::string reason;  // ErrorInfo; empty when the library raised the error
  std::map<std::string, std::string> metadata;
  std::vector<std::string> violations;  // "field: description"
  std::optional<double> retry_seconds;
  bool ok() const { return code == 0; }
};

enum class HealthState { kUnknown, kServing, kNotServing, kNoSuchService, kUnreachable };

struct CallOptions {
  std::optional<std::chrono::milliseconds> timeout;
};

// Any thread; calls block.
class InferenceClient final {
 public:
  // Sees one message of the stream; returns false to cancel the call.
  using OnResponse = std::function<bool(const v1::GenerateResponse&)>;

  // `target`: host:port, plain text. Connects when first used.
  explicit InferenceClient(const std::string& target);
  ~InferenceClient();

  CallResult Generate(const v1::GenerateRequest& request, const OnResponse& on_response,
                      const CallOptions& options = {});
  CallResult GenerateText(const v1::GenerateTextRequest& request,
                          v1::GenerateTextResponse* response, const CallOptions& options = {});
  CallResult Tokenize(const v1::TokenizeRequest& request, v1::TokenizeResponse* response,
                      const CallOptions& options = {});
  CallResult Detokenize(const v1::DetokenizeRequest& request, v1::DetokenizeResponse* response,
                        const CallOptions& options = {});
  CallResult GetModel(const v1::GetModelRequest& request, v1::GetModelResponse* response,
                      const CallOptions& options = {});

  // grpc.health.v1.Health/Check; `result`, when given, gets the status of the call.
  HealthState Health(const std::string& service, CallResult* result = nullptr,
                     const CallOptions& options = {});

  // Any unary method by its path with ready-made bytes: for tests of what servers must survive.
  CallResult CallRaw(const std::string& method, const std::string& request_bytes,
                     std::string* response_bytes, const CallOptions& options = {});

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashquant
