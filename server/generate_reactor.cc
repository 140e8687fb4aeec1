// Reactions pass notes on; actions are those of the session.
#include "server/generate_reactor.h"

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "server/field_count.h"
#include "server/status_mapping.h"

namespace flashquant {
namespace {

// Whatever is in so few bytes takes no more than a few megabytes.
constexpr size_t kParsedUncounted = 64 << 10;

CancelReason CancelReasonOf(const grpc::CallbackServerContext& context, const Clock& clock,
                            TimePoint arrival) {
  const CallTimes now = TimesOf(context, clock);
  if (!now.client_deadline) return CancelReason::kClient;
  return CancelIsDeadline(arrival, *now.client_deadline, now.now) ? CancelReason::kDeadline
                                                                  : CancelReason::kClient;
}

}  // namespace

bool ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  grpc::ByteBuffer copy = bytes;  // shares the memory; the reader wants it writable
  if (bytes.Length() > kParsedUncounted) {
    grpc::ProtoBufferReader counted(&copy);
    if (HasTooManyFields(message->GetDescriptor(), &counted)) return false;
  }
  grpc::ProtoBufferReader reader(&copy);
  return reader.status().ok() && message->ParseFromZeroCopyStream(&reader);
}

RequestError MalformedRequest() {
  RequestError error;
  error.code = absl::StatusCode::kInvalidArgument;
  error.reason = reason::kMalformedRequest;
  error.message = fmt::format(
      "request: cannot be parsed, has over {} fields, or a text in it is not valid UTF-8",
      kMaxFields);
  return error;
}

grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message) {
  grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

CallTimes TimesOf(const grpc::CallbackServerContext& context, const Clock& clock) {
  CallTimes times;
  times.now = clock.Now();
  const std::chrono::system_clock::time_point deadline = context.deadline();
  // No deadline is a time in the far future. The wall clock is used for this difference alone.
  const auto left = deadline - std::chrono::system_clock::now();
  if (left < std::chrono::hours(24 * 365)) {
    times.client_deadline = times.now + std::chrono::duration_cast<Duration>(left);
  }
  return times;
}

grpc::Status FinishStatus(const RequestError& error, grpc::CallbackServerContext* context) {
  if (error.retry_delay) {
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(*error.retry_delay);
    context->AddTrailingMetadata("grpc-retry-pushback-ms", std::to_string(ms.count()));
  }
  return ToGrpcStatus(error);
}

namespace {

std::optional<AuthFailure> AuthFailureOf(TokenVerdict verdict) {
  switch (verdict) {
    case TokenVerdict::kAccepted:
      return std::nullopt;
    case TokenVerdict::kMissing:
      return AuthFailure::kMissing;
    case TokenVerdict::kMalformed:
      return AuthFailure::kMalformed;
    case TokenVerdict::kUnknown:
      return AuthFailure::kUnknown;
    case TokenVerdict::kExpired:
      return AuthFailure::kExpired;
  }
  return AuthFailure::kUnknown;
}

}  // namespace

std::optional<RequestError> CheckCredentials(const CallEnvironment& environment,
                                             const grpc::CallbackServerContext& context) {
  if (environment.security == nullptr) return std::nullopt;
  std::vector<std::string_view> headers;
  const auto [begin, end] = context.client_metadata().equal_range("authorization");
  for (auto header = begin; header != end; ++header) {
    headers.emplace_back(header->second.data(), header->second.size());
  }
  const std::optional<AuthFailure> failure =
      AuthFailureOf(environment.security->CheckToken(headers));
  if (!failure) return std::nullopt;
  if (Metrics* metrics = environment.submitter->metrics()) {
    metrics->AuthFailed(*failure);
    metrics->RequestRejected(RejectReason::kUnauthenticated);
  }
  return ErrorForReason(*failure == AuthFailure::kMissing ? reason::kCredentialsMissing
                                                          : reason::kCredentialsInvalid);
}

namespace {

std::optional<RequestError> Submit(const CallEnvironment& environment,
                                   const grpc::CallbackServerContext& context,
                                   const v1::GenerateRequest& request, CallSink* sink,
                                   std::shared_ptr<GenerateSession>* session) {
  const CallTimes times = TimesOf(context, *environment.submitter->clock());
  std::optional<RequestError> error = environment.submitter->Submit(request, times, sink, session);
  if (!error) environment.delivery->Register(*session);
  return error;
}

bool Generates(RpcMethod method) {
  return method == RpcMethod::kGenerate || method == RpcMethod::kGenerateText;
}

}  // namespace

CallCounter::CallCounter(const CallEnvironment& environment, RpcMethod method)
    : environment_(environment), method_(method) {
  environment_.live_calls->Add();
  if (Metrics* metrics = environment_.submitter->metrics()) {
    metrics->RequestReceived(method_);
    if (Generates(method_)) metrics->StreamOpened();
  }
}

CallCounter::~CallCounter() {
  if (Metrics* metrics = environment_.submitter->metrics()) {
    metrics->RequestFinished(method_, code_);
    if (Generates(method_)) metrics->StreamClosed();
  }
  environment_.live_calls->Remove();
}

GenerateReactor::GenerateReactor(const CallEnvironment& environment,
                                 grpc::CallbackServerContext* context)
    : environment_(environment), context_(context), counter_(environment, RpcMethod::kGenerate) {}

GenerateReactor* GenerateReactor::Start(const CallEnvironment& environment,
                                        grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer& request) {
  auto* reactor = new GenerateReactor(environment, context);
  const std::optional<RequestError> error = OrNoMemory([&]() -> std::optional<RequestError> {
    if (auto refusal = CheckCredentials(environment, *context)) return refusal;
    v1::GenerateRequest message;
    if (!ParseMessage(request, &message)) return MalformedRequest();
    return Submit(environment, *context, message, reactor, &reactor->session_);
  });
  // gRPC runs what is started here after the handler has returned, so the reactor still lives.
  if (error) reactor->Finish(*error);
  return reactor;
}

void GenerateReactor::Write(v1::GenerateResponse response) {
  response_ = SerializeMessage(response);
  StartWrite(&response_);
}

void GenerateReactor::WriteAndFinish(v1::GenerateResponse response) {
  response_ = SerializeMessage(response);
  StartWriteAndFinish(&response_, grpc::WriteOptions(), grpc::Status::OK);
}

void GenerateReactor::Finish(const RequestError& error) {
  counter_.set_code(error.code);
  ServerWriteReactor::Finish(FinishStatus(error, context_));
}

void GenerateReactor::OnWriteDone(bool ok) { environment_.delivery->OnWriteDone(session_, ok); }

void GenerateReactor::OnCancel() {
  if (session_ != nullptr)
    session_->Cancel(
        CancelReasonOf(*context_, *environment_.submitter->clock(), session_->arrival()));
}

void GenerateReactor::OnDone() { delete this; }

GenerateTextReactor::GenerateTextReactor(const CallEnvironment& environment,
                                         grpc::CallbackServerContext* context,
                                         grpc::ByteBuffer* response)
    : environment_(environment),
      context_(context),
      response_bytes_(response),
      counter_(environment, RpcMethod::kGenerateText) {}

GenerateTextReactor* GenerateTextReactor::Start(const CallEnvironment& environment,
                                                grpc::CallbackServerContext* context,
                                                const grpc::ByteBuffer& request,
                                                grpc::ByteBuffer* response) {
  auto* reactor = new GenerateTextReactor(environment, context, response);
  const std::optional<RequestError> error = OrNoMemory([&]() -> std::optional<RequestError> {
    if (auto refusal = CheckCredentials(environment, *context)) return refusal;
    v1::GenerateTextRequest message;
    if (!ParseMessage(request, &message)) return MalformedRequest();
    return Submit(environment, *context, message.request(), reactor, &reactor->session_);
  });
  if (error) reactor->Finish(*error);
  return reactor;
}

void GenerateTextReactor::Write(v1::GenerateResponse response) {
  if (response.has_accepted()) {
    *response_.mutable_accepted() = std::move(*response.mutable_accepted());
  } else if (!too_large_) {
    response_.mutable_text()->append(response.delta().text());
    response_.mutable_token_ids()->MergeFrom(response.delta().token_ids());
    response_.mutable_logprobs()->MergeFrom(response.delta().logprobs());
    answer_bytes_ += response.delta().ByteSizeLong();
    if (answer_bytes_ > kMaxAnswerBytes) {
      too_large_ = true;
      session_->Cancel(CancelReason::kClient);
    }
  }
  environment_.delivery->OnWriteDone(session_, true);
}

void GenerateTextReactor::WriteAndFinish(v1::GenerateResponse response) {
  if (too_large_) {
    Finish(ErrorForReason(reason::kAnswerTooLarge));
    return;
  }
  *response_.mutable_finished() = std::move(*response.mutable_finished());
  *response_bytes_ = SerializeMessage(response_);
  ServerUnaryReactor::Finish(grpc::Status::OK);
}

void GenerateTextReactor::Finish(const RequestError& error) {
  const RequestError shown = too_large_ ? ErrorForReason(reason::kAnswerTooLarge) : error;
  counter_.set_code(shown.code);
  ServerUnaryReactor::Finish(FinishStatus(shown, context_));
}

void GenerateTextReactor::OnCancel() {
  if (session_ != nullptr)
    session_->Cancel(
        CancelReasonOf(*context_, *environment_.submitter->clock(), session_->arrival()));
}

void GenerateTextReactor::OnDone() { delete this; }

}  // namespace flashquant
