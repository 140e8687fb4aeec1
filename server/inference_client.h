// InferenceClient: calls of a running server without gRPC in its header: for `flashquant generate`,
// `flashquant health` and the tests.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "flashquant/v1/inference.pb.h"

namespace grpc {
class Channel;
class Status;
}  // namespace grpc

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

// How to reach a server that asks for more than plain text.
struct ClientSecurity {
  bool tls = false;
  std::string ca_pem;    // empty = the system's CAs
  std::string cert_pem;  // with key_pem: the client's own certificate
  std::string key_pem;
  bool check_server = true;  // false: any certificate will do; then no name is compared either
  std::string server_name;   // name that the certificate must have, instead of the target's host
  std::string token;         // bearer token; empty = none
};

struct CallOptions {
  std::optional<std::chrono::milliseconds> timeout;
  std::vector<std::pair<std::string, std::string>> metadata = {};  // headers, beside the token
};

// A channel with a connection of its own and without the library's retries, for callers with stubs
// of their own. The token is not part of it: it goes with each call.
std::shared_ptr<grpc::Channel> MakeClientChannel(const std::string& target,
                                                 const ClientSecurity& security);
// Takes a status and its google.rpc details apart.
CallResult ToCallResult(const grpc::Status& status);

// Any thread; calls block.
class InferenceClient final {
 public:
  // Sees one message of the stream; returns false to cancel the call.
  using OnResponse = std::function<bool(const v1::GenerateResponse&)>;

  // `target`: host:port. Connects when first used.
  explicit InferenceClient(const std::string& target, const ClientSecurity& security = {});
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
