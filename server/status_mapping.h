// From the engine's absl::Status and the server's RequestError to the status of an RPC, in one
// table.
//
// The details (google.rpc.Status in the standard trailer) hold ErrorInfo, and BadRequest or
// RetryInfo where they apply. Texts of endings come from the table, never from inside the engine.
#pragma once

#include "absl/status/status.h"
#include "engine/request.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"
#include "server/request_error.h"

namespace flashquant {

// The error of a reason from the table with its code, text and retry delay. Unknown reasons give
// INTERNAL_ERROR.
RequestError ErrorForReason(std::string_view reason);

// An error that Engine::Submit returned: its text is for clients (limits and numbers only), its
// reason is the payload kErrorReasonPayload, its field and numbers those of WithSubject.
RequestError ErrorFromSubmit(const absl::Status& status);

// The error of an answer that ended with one (event.status is not OK).
RequestError ErrorFromFinished(const FinishedEvent& event);

google::rpc::Status ToRpcStatus(const RequestError& error);
grpc::Status ToGrpcStatus(const RequestError& error);

// "INVALID_ARGUMENT": names of gRPC status codes, for metrics labels and the client.
const char* StatusCodeName(int grpc_code);

}  // namespace flashquant
