// The two reactors of Generate and GenerateText: one RPC each.
//
// Every gRPC action of an accepted call comes from the delivery thread (CallSink), so no two of
// them race: one write in flight, exactly one Finish, and nothing touches the reactor after it.
// gRPC's reactions only pass notes on. The reactor deletes itself in OnDone, which gRPC calls last.
#pragma once

#include <memory>
#include <new>
#include <optional>
#include <string>

#include "flashquant/v1/inference.pb.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/call_submitter.h"
#include "server/generate_session.h"
#include "server/live_calls.h"
#include "server/server_security.h"
#include "server/status_mapping.h"

namespace flashquant {

// What a reactor works with; outlives it.
struct CallEnvironment {
  CallSubmitter* submitter = nullptr;
  DeliveryThread* delivery = nullptr;
  LiveCalls* live_calls = nullptr;
  const ServerSecurity* security = nullptr;  // null: anybody may call
};

// Arrival now, and the client's deadline, if it has one.
CallTimes TimesOf(const grpc::CallbackServerContext& context, const Clock& clock);
// False when the bytes are not a message of this type, a text field in it is not UTF-8, or it would
// take far more memory than its bytes (field_count.h).
bool ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
RequestError MalformedRequest();
grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message);
// The status of a failed call; asks the client to wait before a retry where that helps.
grpc::Status FinishStatus(const RequestError& error, grpc::CallbackServerContext* context);

// The error of `begin`, or that of a call for which there is no memory; nullopt: none.
template <typename Begin>
std::optional<RequestError> OrNoMemory(Begin begin) {
  try {
    return begin();
  } catch (const std::bad_alloc&) {
    return ErrorForReason(reason::kQueueFull);
  }
}

// Why this caller is refused; counts it. The first thing that every method does, the unknown ones
// included; only health is open.
std::optional<RequestError> CheckCredentials(const CallEnvironment& environment,
                                             const grpc::CallbackServerContext& context);

// Counts a call in the constructor, and its end in the destructor.
class CallCounter final {
 public:
  CallCounter(const CallEnvironment& environment, RpcMethod method);
  ~CallCounter();
  CallCounter(const CallCounter&) = delete;
  CallCounter& operator=(const CallCounter&) = delete;
  void set_code(absl::StatusCode code) { code_ = code; }

 private:
  const CallEnvironment environment_;
  const RpcMethod method_;
  absl::StatusCode code_ = absl::StatusCode::kOk;
};

class GenerateReactor final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public CallSink {
 public:
  // Owned by gRPC's reactions. `request` is not kept.
  static GenerateReactor* Start(const CallEnvironment& environment,
                                grpc::CallbackServerContext* context,
                                const grpc::ByteBuffer& request);

  void Write(v1::GenerateResponse response) override;
  void WriteAndFinish(v1::GenerateResponse response) override;
  void Finish(const RequestError& error) override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  GenerateReactor(const CallEnvironment& environment, grpc::CallbackServerContext* context);
  ~GenerateReactor() override = default;

  const CallEnvironment environment_;
  grpc::CallbackServerContext* const context_;
  CallCounter counter_;
  std::shared_ptr<GenerateSession> session_;  // set before any write; null when refused
  grpc::ByteBuffer response_;                 // in flight
};

// Gathers the stream into one answer; a write is done at once.
class GenerateTextReactor final : public grpc::ServerUnaryReactor, public CallSink {
 public:
  static constexpr size_t kMaxAnswerBytes = 1 << 20;

  static GenerateTextReactor* Start(const CallEnvironment& environment,
                                    grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer& request, grpc::ByteBuffer* response);

  void Write(v1::GenerateResponse response) override;
  void WriteAndFinish(v1::GenerateResponse response) override;
  void Finish(const RequestError& error) override;

  void OnCancel() override;
  void OnDone() override;

 private:
  GenerateTextReactor(const CallEnvironment& environment, grpc::CallbackServerContext* context,
                      grpc::ByteBuffer* response);
  ~GenerateTextReactor() override = default;

  const CallEnvironment environment_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const response_bytes_;
  v1::GenerateTextResponse response_;
  CallCounter counter_;
  std::shared_ptr<GenerateSession> session_;
  size_t answer_bytes_ = 0;
  bool too_large_ = false;
};

}  // namespace flashquant
