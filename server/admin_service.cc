// One function per method: credentials first, then the answer at once.
#include "server/admin_service.h"

#include <optional>
#include <utility>

#include "engine/engine.h"
#include "server/request_mapping.h"
#include "server/status_mapping.h"

namespace flashquant {
namespace {

constexpr size_t kMaxListed = 10'000;

// Checks credentials, then finishes with what `answer` returns: an error, or nothing.
template <typename Answer>
grpc::ServerUnaryReactor* Run(const CallEnvironment& environment,
                              grpc::CallbackServerContext* context, const Answer& answer) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  std::optional<RequestError> error = CheckCredentials(environment, *context);
  if (!error) error = answer();
  reactor->Finish(error ? FinishStatus(*error, context) : grpc::Status::OK);
  return reactor;
}

}  // namespace

AdminService::AdminService(const CallEnvironment& environment, std::function<void(bool)> set_drain)
    : environment_(environment), set_drain_(std::move(set_drain)) {}

v1::ServingState AdminService::State() const {
  switch (environment_.submitter->state()) {
    case ServingState::kLoading:
      return v1::SERVING_STATE_LOADING;
    case ServingState::kServing:
      return v1::SERVING_STATE_SERVING;
    case ServingState::kDraining:
      return v1::SERVING_STATE_DRAINING;
    case ServingState::kFailed:
      return v1::SERVING_STATE_FAILED;
  }
  return v1::SERVING_STATE_UNSPECIFIED;
}

grpc::ServerUnaryReactor* AdminService::GetEngineStats(grpc::CallbackServerContext* context,
                                                       const v1::GetEngineStatsRequest* /*request*/,
                                                       v1::GetEngineStatsResponse* response) {
  return Run(environment_, context, [&]() -> std::optional<RequestError> {
    response->set_state(State());
    const Engine* engine = environment_.submitter->engine();
    if (engine == nullptr) return std::nullopt;
    const EngineStats stats = engine->stats();
    response->set_requests_waiting(static_cast<uint32_t>(stats.requests_waiting));
    response->set_requests_running(static_cast<uint32_t>(stats.requests_running));
    response->set_requests_preempted(static_cast<uint32_t>(stats.requests_preempted));
    response->set_requests_paused(static_cast<uint32_t>(stats.requests_paused));
    response->set_kv_blocks_total(static_cast<uint32_t>(stats.kv_blocks_total));
    response->set_kv_blocks_used(static_cast<uint32_t>(stats.kv_blocks_used));
    response->set_kv_blocks_unaccounted(stats.kv_blocks_unaccounted);
    response->set_steps(static_cast<uint64_t>(stats.steps));
    return std::nullopt;
  });
}

grpc::ServerUnaryReactor* AdminService::ListRequests(grpc::CallbackServerContext* context,
                                                     const v1::ListRequestsRequest* /*request*/,
                                                     v1::ListRequestsResponse* response) {
  return Run(environment_, context, [&]() -> std::optional<RequestError> {
    const TimePoint now = environment_.submitter->clock()->Now();
    for (const OpenCall& call : environment_.submitter->open_calls().List(kMaxListed)) {
      v1::OpenRequest* row = response->add_requests();
      row->set_request_id(call.request_id);
      row->set_priority(call.priority);
      row->set_prompt_tokens(static_cast<uint32_t>(call.prompt_tokens));
      row->set_max_output_tokens(static_cast<uint32_t>(call.max_output_tokens));
      row->set_undelivered_tokens(static_cast<uint32_t>(call.undelivered_tokens));
      *row->mutable_age() = ToProtoDuration(now - call.arrival);
    }
    return std::nullopt;
  });
}

grpc::ServerUnaryReactor* AdminService::CancelRequest(grpc::CallbackServerContext* context,
                                                      const v1::CancelRequestRequest* request,
                                                      v1::CancelRequestResponse* /*response*/) {
  return Run(environment_, context, [&]() -> std::optional<RequestError> {
    if (environment_.submitter->open_calls().Cancel(request->request_id())) return std::nullopt;
    RequestError error = ErrorForReason(reason::kRequestNotFound);
    error.metadata["field"] = "request_id";
    return error;
  });
}

grpc::ServerUnaryReactor* AdminService::SetDrain(grpc::CallbackServerContext* context,
                                                 const v1::SetDrainRequest* request,
                                                 v1::SetDrainResponse* response) {
  return Run(environment_, context, [&]() -> std::optional<RequestError> {
    set_drain_(request->drain());
    response->set_state(State());
    return std::nullopt;
  });
}

grpc::ServerUnaryReactor* AdminService::ResetPrefixCache(
    grpc::CallbackServerContext* context, const v1::ResetPrefixCacheRequest* /*request*/,
    v1::ResetPrefixCacheResponse* /*response*/) {
  return Run(environment_, context, [&]() -> std::optional<RequestError> {
    if (Engine* engine = environment_.submitter->engine()) engine->ResetPrefixCache();
    return std::nullopt;
  });
}

}  // namespace flashquant
