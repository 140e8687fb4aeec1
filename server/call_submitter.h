// CallSubmitter: takes a Generate request through checks, tokenizer and limits into the engine, and
// answers for the states in which it cannot. No gRPC here.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "engine/base/clock.h"
#include "engine/engine.h"
#include "engine/metrics.h"
#include "engine/tokenizer/tokenizer.h"
#include "flashquant/v1/inference.pb.h"
#include "server/delivery_thread.h"
#include "server/generate_session.h"
#include "server/open_calls.h"
#include "server/request_error.h"
#include "server/request_mapping.h"

namespace flashquant {

// The model that a server answers with. Immutable once served; the pointers outlive the server.
struct ServingModel {
  ServingModel(MapperOptions options, Engine* engine_of_model)
      : mapper(std::move(options)), engine(engine_of_model) {}

  RequestMapper mapper;
  Engine* engine;
  v1::GetModelResponse info;
};

// Loading -> serving -> draining or failed; draining and failed are final, but for the draining of
// SetAdminDrain.
enum class ServingState { kLoading, kServing, kDraining, kFailed };

// Any thread, except SetServing.
class CallSubmitter final {
 public:
  CallSubmitter(const Clock* clock, Metrics* metrics, Duration slow_reader);

  // Once, before any other thread can see kServing.
  void SetServing(std::unique_ptr<const ServingModel> model);
  void SetDraining() { LeaveServing(ServingState::kDraining); }
  void SetFailed() { LeaveServing(ServingState::kFailed); }
  // The operator's drain: while it is on, a serving server is a draining one. Any thread.
  void SetAdminDrain(bool drain) { admin_drain_.store(drain); }
  ServingState state() const;

  // The served model, or null with MODEL_LOADING, DRAINING or ENGINE_FAILED in `error`.
  const ServingModel* Model(RequestError* error) const;

  // Starts the request: `*session`, set before the sink can be called, lets `sink` answer from the
  // delivery thread. When the request is refused, returns why and leaves `*session` null: the sink
  // was not and will not be called.
  std::optional<RequestError> Submit(const v1::GenerateRequest& request, const CallTimes& times,
                                     CallSink* sink, std::shared_ptr<GenerateSession>* session);

  // The engine behind the model, null before SetServing. It may not be asked once the server is
  // shut down.
  Engine* engine() const;
  // Those that the engine has accepted.
  OpenCalls& open_calls() { return open_calls_; }

  const Clock* clock() const { return clock_; }
  Metrics* metrics() const { return metrics_; }

 private:
  void LeaveServing(ServingState to);
  std::optional<RequestError> Map(const ServingModel& model, const v1::GenerateRequest& request,
                                  const CallTimes& times, MappedRequest* mapped) const;
  std::optional<RequestError> SubmitUncounted(const v1::GenerateRequest& request,
                                              const CallTimes& times, CallSink* sink,
                                              std::shared_ptr<GenerateSession>* session);
  void CountRejected(const RequestError& error) const;

  const Clock* const clock_;
  Metrics* const metrics_;
  const Duration slow_reader_;
  std::unique_ptr<const ServingModel> model_;  // written before state_ becomes kServing
  std::atomic<ServingState> state_{ServingState::kLoading};
  std::atomic<bool> admin_drain_{false};
  OpenCalls open_calls_;
};

}  // namespace flashquant
