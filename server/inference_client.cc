// Blocking stubs, and raw bytes through the generic stub. The health messages are two fields, read
// and written by hand: the distribution ships no health.proto.
#include "server/inference_client.h"

#include <utility>
#include <vector>

#include "flashquant/v1/inference_service.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_certificate_verifier.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace flashquant {
namespace {

std::shared_ptr<grpc::ChannelCredentials> MakeUncheckedCredentials(const ClientSecurity& security) {
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_verify_server_certs(false);
  options.set_certificate_verifier(std::make_shared<grpc::experimental::NoOpCertificateVerifier>());
  options.set_check_call_host(false);
  if (!security.cert_pem.empty()) {
    const grpc::experimental::IdentityKeyCertPair pair = {security.key_pem, security.cert_pem};
    options.set_certificate_provider(
        std::make_shared<grpc::experimental::StaticDataCertificateProvider>(
            std::vector<grpc::experimental::IdentityKeyCertPair>{pair}));
    options.watch_identity_key_cert_pairs();
  }
  return grpc::experimental::TlsCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> MakeCredentials(const ClientSecurity& security) {
  if (!security.tls) return grpc::InsecureChannelCredentials();
  if (!security.check_server) return MakeUncheckedCredentials(security);
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = security.ca_pem;
  options.pem_cert_chain = security.cert_pem;
  options.pem_private_key = security.key_pem;
  return grpc::SslCredentials(options);
}

grpc::ByteBuffer ToByteBuffer(const std::string& bytes) {
  grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Dump(&slices).ok()) return bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

}  // namespace

CallResult ToCallResult(const grpc::Status& status) {
  CallResult result;
  result.code = static_cast<int>(status.error_code());
  result.message = status.error_message();
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return result;
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad_request;
    google::rpc::RetryInfo retry;
    if (detail.UnpackTo(&info)) {
      result.reason = info.reason();
      result.metadata = {info.metadata().begin(), info.metadata().end()};
    } else if (detail.UnpackTo(&bad_request)) {
      for (const auto& violation : bad_request.field_violations()) {
        result.violations.push_back(violation.field() + ": " + violation.description());
      }
    } else if (detail.UnpackTo(&retry)) {
      result.retry_seconds =
          static_cast<double>(retry.retry_delay().seconds()) + retry.retry_delay().nanos() * 1e-9;
    }
  }
  return result;
}

std::shared_ptr<grpc::Channel> MakeClientChannel(const std::string& target,
                                                 const ClientSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  // Channels of one process to one target would share a connection; tests want their own.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // The library's own retries would hide which attempt failed.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  if (!security.server_name.empty()) {
    arguments.SetSslTargetNameOverride(security.server_name);
  }
  return grpc::CreateCustomChannel(target, MakeCredentials(security), arguments);
}

class InferenceClient::Impl {
 public:
  Impl(const std::string& target, const ClientSecurity& security) : token_(security.token) {
    channel_ = MakeClientChannel(target, security);
    stub_ = v1::InferenceService::NewStub(channel_);
  }

  // The token is plain metadata, not call credentials: those need TLS, and a server behind a proxy
  // that ends TLS has none.
  void Prepare(const CallOptions& options, grpc::ClientContext* context) const {
    if (options.timeout) context->set_deadline(std::chrono::system_clock::now() + *options.timeout);
    if (!token_.empty()) context->AddMetadata("authorization", "Bearer " + token_);
    for (const auto& [key, value] : options.metadata) context->AddMetadata(key, value);
  }

  grpc::Status RawCall(const std::string& method, const std::string& request_bytes,
                       std::string* response_bytes, const CallOptions& options) {
    grpc::ClientContext context;
    Prepare(options, &context);
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    const grpc::ByteBuffer request = ToByteBuffer(request_bytes);
    grpc::ByteBuffer response;
    grpc::Status status;
    auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    call->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    queue.Shutdown();
    while (queue.Next(&tag, &ok)) {
    }
    if (status.ok() && response_bytes != nullptr) *response_bytes = ToString(response);
    return status;
  }

  template <typename Method, typename Request, typename Response>
  CallResult Unary(Method method, const Request& request, Response* response,
                   const CallOptions& options) {
    grpc::ClientContext context;
    Prepare(options, &context);
    return ToCallResult((stub_.get()->*method)(&context, request, response));
  }

  const std::string token_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

InferenceClient::InferenceClient(const std::string& target, const ClientSecurity& security)
    : impl_(std::make_unique<Impl>(target, security)) {}
InferenceClient::~InferenceClient() = default;

CallResult InferenceClient::Generate(const v1::GenerateRequest& request,
                                     const OnResponse& on_response, const CallOptions& options) {
  grpc::ClientContext context;
  impl_->Prepare(options, &context);
  const auto reader = impl_->stub_->Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (!on_response(response)) {
      context.TryCancel();
      break;
    }
  }
  // What was sent before the cancel must be read, or Finish would not return.
  while (reader->Read(&response)) {
  }
  return ToCallResult(reader->Finish());
}

CallResult InferenceClient::GenerateText(const v1::GenerateTextRequest& request,
                                         v1::GenerateTextResponse* response,
                                         const CallOptions& options) {
  return impl_->Unary(&v1::InferenceService::Stub::GenerateText, request, response, options);
}

CallResult InferenceClient::Tokenize(const v1::TokenizeRequest& request,
                                     v1::TokenizeResponse* response, const CallOptions& options) {
  return impl_->Unary(&v1::InferenceService::Stub::Tokenize, request, response, options);
}

CallResult InferenceClient::Detokenize(const v1::DetokenizeRequest& request,
                                       v1::DetokenizeResponse* response,
                                       const CallOptions& options) {
  return impl_->Unary(&v1::InferenceService::Stub::Detokenize, request, response, options);
}

CallResult InferenceClient::GetModel(const v1::GetModelRequest& request,
                                     v1::GetModelResponse* response, const CallOptions& options) {
  return impl_->Unary(&v1::InferenceService::Stub::GetModel, request, response, options);
}

CallResult InferenceClient::CallRaw(const std::string& method, const std::string& request_bytes,
                                    std::string* response_bytes, const CallOptions& options) {
  return ToCallResult(impl_->RawCall(method, request_bytes, response_bytes, options));
}

HealthState InferenceClient::Health(const std::string& service, CallResult* result,
                                    const CallOptions& options) {
  // HealthCheckRequest { string service = 1; }, HealthCheckResponse { enum status = 1; }.
  std::string request;
  if (!service.empty()) {
    request = "\x0a";
    request += static_cast<char>(std::min<size_t>(service.size(), 127));
    request += service.substr(0, 127);
  }
  std::string response;
  const grpc::Status status =
      impl_->RawCall("/grpc.health.v1.Health/Check", request, &response, options);
  if (result != nullptr) *result = ToCallResult(status);
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) return HealthState::kNoSuchService;
  if (!status.ok()) return HealthState::kUnreachable;
  if (response.size() < 2 || response[0] != 0x08) return HealthState::kUnknown;
  if (response[1] == 1) return HealthState::kServing;
  return response[1] == 2 ? HealthState::kNotServing : HealthState::kUnknown;
}

}  // namespace flashquant
