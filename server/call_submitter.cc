// The way in of a Generate request.
#include "server/call_submitter.h"

#include <new>
#include <string>
#include <utility>

#include "server/status_mapping.h"

namespace flashquant {
namespace {

RejectReason RejectReasonOf(const RequestError& error) {
  const std::string& why = error.reason;
  if (why == reason::kPromptTooLong || why == reason::kContextLengthExceeded) {
    return RejectReason::kTooLong;
  }
  if (why == reason::kKvCapacityExceeded) return RejectReason::kKvCapacity;
  if (why == reason::kQueueFull) return RejectReason::kQueueFull;
  if (why == reason::kDraining) return RejectReason::kDraining;
  if (why == reason::kModelLoading || why == reason::kEngineFailed) return RejectReason::kNotReady;
  return RejectReason::kInvalid;
}

std::unique_ptr<TextStream> MakeTextStream(const MapperOptions& options,
                                           const MappedRequest& mapped) {
  if (options.tokenizer == nullptr || mapped.output.omit_text) return nullptr;
  return std::make_unique<TextStream>(options.tokenizer, mapped.request.stop,
                                      options.eos_token_ids);
}

}  // namespace

CallSubmitter::CallSubmitter(const Clock* clock, Metrics* metrics, Duration slow_reader)
    : clock_(clock), metrics_(metrics), slow_reader_(slow_reader) {}

void CallSubmitter::SetServing(std::unique_ptr<const ServingModel> model) {
  model_ = std::move(model);
  ServingState expected = ServingState::kLoading;
  state_.compare_exchange_strong(expected, ServingState::kServing);
}

void CallSubmitter::LeaveServing(ServingState to) {
  ServingState now = state_.load();
  while (now == ServingState::kLoading || now == ServingState::kServing) {
    if (state_.compare_exchange_weak(now, to)) return;
  }
}

ServingState CallSubmitter::state() const {
  const ServingState state = state_.load();
  return state == ServingState::kServing && admin_drain_.load() ? ServingState::kDraining : state;
}

Engine* CallSubmitter::engine() const {
  // Loading: nobody but SetServing may look at the model.
  if (state_.load() == ServingState::kLoading || model_ == nullptr) return nullptr;
  return model_->engine;
}

const ServingModel* CallSubmitter::Model(RequestError* error) const {
  switch (state()) {
    case ServingState::kServing:
      return model_.get();
    case ServingState::kLoading:
      *error = ErrorForReason(reason::kModelLoading);
      return nullptr;
    case ServingState::kDraining:
      *error = ErrorForReason(reason::kDraining);
      return nullptr;
    case ServingState::kFailed:
      *error = ErrorForReason(reason::kEngineFailed);
      return nullptr;
  }
  return nullptr;
}

std::optional<RequestError> CallSubmitter::Map(const ServingModel& model,
                                               const v1::GenerateRequest& request,
                                               const CallTimes& times,
                                               MappedRequest* mapped) const {
  if (std::optional<RequestError> error = CheckDeadline(times)) return error;
  if (std::optional<RequestError> error =
          ValidateGenerate(request, model.mapper.options().limits)) {
    return error;
  }
  std::vector<int32_t> prompt_tokens;
  const TimePoint tokenize_start = clock_->Now();
  if (std::optional<RequestError> error = model.mapper.EncodePrompt(request, &prompt_tokens)) {
    return error;
  }
  if (metrics_ != nullptr && !request.has_token_ids()) {
    metrics_->ObserveTokenizeDuration(clock_->Now() - tokenize_start);
  }
  return model.mapper.Build(request, std::move(prompt_tokens), times, mapped);
}

std::optional<RequestError> CallSubmitter::Submit(const v1::GenerateRequest& request,
                                                  const CallTimes& times, CallSink* sink,
                                                  std::shared_ptr<GenerateSession>* session) {
  std::optional<RequestError> error = SubmitUncounted(request, times, sink, session);
  if (error) CountRejected(*error);
  return error;
}

std::optional<RequestError> CallSubmitter::SubmitUncounted(
    const v1::GenerateRequest& request, const CallTimes& times, CallSink* sink,
    std::shared_ptr<GenerateSession>* session) {
  RequestError not_serving;
  const ServingModel* model = Model(&not_serving);
  if (model == nullptr) return not_serving;
  MappedRequest mapped;
  if (std::optional<RequestError> error = Map(*model, request, times, &mapped)) return error;

  SessionSettings settings;
  settings.accepted = model->mapper.MakeAccepted(mapped.request);
  settings.stop = mapped.request.stop;
  settings.output = mapped.output;
  settings.arrival = times.now;
  settings.text = MakeTextStream(model->mapper.options(), mapped);
  settings.tokenizer = model->mapper.options().tokenizer;
  settings.slow_reader = slow_reader_;
  settings.metrics = metrics_;
  *session = std::make_shared<GenerateSession>(sink, std::move(settings));
  OpenCall call = {.request_id = mapped.request.request_id,
                   .priority = mapped.request.priority,
                   .prompt_tokens = static_cast<int64_t>(mapped.request.prompt_tokens.size()),
                   .max_output_tokens = mapped.request.stop.max_output_tokens,
                   .arrival = times.now};
  absl::StatusOr<std::shared_ptr<RequestStream>> stream =
      model->engine->Submit(std::move(mapped.request), *session);
  if (!stream.ok()) {
    session->reset();
    return ErrorFromSubmit(stream.status());
  }
  (*session)->SetStream(*stream);
  try {
    open_calls_.Add(std::move(call), *stream);
  } catch (const std::bad_alloc&) {
    // The engine has it: it runs, unlisted.
  }
  return std::nullopt;
}

void CallSubmitter::CountRejected(const RequestError& error) const {
  if (metrics_ == nullptr || error.code == absl::StatusCode::kDeadlineExceeded) return;
  metrics_->RequestRejected(RejectReasonOf(error));
}

}  // namespace flashquant
