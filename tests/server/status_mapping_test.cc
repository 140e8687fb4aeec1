// Codes, texts and details of errors as a client sees them.
#include "server/status_mapping.h"

#include <chrono>

#include "engine/base/error_reason.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

template <typename Detail>
std::optional<Detail> FindDetail(const google::rpc::Status& status) {
  for (const google::protobuf::Any& any : status.details()) {
    Detail detail;
    if (any.UnpackTo(&detail)) return detail;
  }
  return std::nullopt;
}

TEST(StatusMappingTest, DetailsCarryReasonDomainAndMetadata) {
  const RequestError error = ErrorFromViolations(
      absl::StatusCode::kInvalidArgument,
      {{"sampling.top_k", "above vocabulary size (limit 5)", "PARAMETER_OUT_OF_RANGE", "5", "9"},
       {"stop.max_output_tokens", "must be at least 1", "PARAMETER_OUT_OF_RANGE", "", ""}});
  const grpc::Status status = ToGrpcStatus(error);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "sampling.top_k: above vocabulary size (limit 5)");
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 3);
  EXPECT_EQ(details.message(), status.error_message());
  const auto info = FindDetail<google::rpc::ErrorInfo>(details);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason(), "PARAMETER_OUT_OF_RANGE");
  EXPECT_EQ(info->domain(), "flashquant.dev");
  EXPECT_EQ(info->metadata().at("field"), "sampling.top_k");
  EXPECT_EQ(info->metadata().at("limit"), "5");
  EXPECT_EQ(info->metadata().at("got"), "9");
  const auto bad_request = FindDetail<google::rpc::BadRequest>(details);
  ASSERT_TRUE(bad_request.has_value());
  ASSERT_EQ(bad_request->field_violations_size(), 2);
  EXPECT_EQ(bad_request->field_violations(1).field(), "stop.max_output_tokens");
  EXPECT_FALSE(FindDetail<google::rpc::RetryInfo>(details).has_value());
}

struct Row {
  const char* reason;
  absl::StatusCode code;
  const char* message;
  bool retry;
};

TEST(StatusMappingTest, EveryEndingHasItsCodeTextAndRetry) {
  const Row rows[] = {
      {"MODEL_LOADING", absl::StatusCode::kUnavailable, "model is loading", true},
      {"DRAINING", absl::StatusCode::kUnavailable, "server is shutting down", true},
      {"ENGINE_FAILED", absl::StatusCode::kUnavailable, "engine failed", true},
      {"QUEUE_TIMEOUT", absl::StatusCode::kResourceExhausted, "waited longer than queue_timeout",
       true},
      {"SLOW_READER", absl::StatusCode::kResourceExhausted, "client does not read", false},
      {"NON_FINITE_LOGITS", absl::StatusCode::kInternal, "model produced non-finite values", false},
      {"CANCELLED", absl::StatusCode::kCancelled, "cancelled", false},
      {"DEADLINE_EXCEEDED", absl::StatusCode::kDeadlineExceeded, "deadline has passed", false},
      {"NO_SUCH_REASON", absl::StatusCode::kInternal, "internal error", false},
  };
  for (const Row& row : rows) {
    const RequestError error = ErrorForReason(row.reason);
    EXPECT_EQ(error.code, row.code) << row.reason;
    EXPECT_EQ(error.message, row.message);
    EXPECT_EQ(error.retry_delay.has_value(), row.retry) << row.reason;
    EXPECT_EQ(FindDetail<google::rpc::RetryInfo>(ToRpcStatus(error)).has_value(), row.retry);
  }
}

TEST(StatusMappingTest, SubmitErrorsKeepTheirNumbers) {  // R13, S1
  const RequestError full = ErrorFromSubmit(
      WithReason(absl::ResourceExhaustedError("queue full (limit 8)"), "QUEUE_FULL"));
  EXPECT_EQ(full.reason, "QUEUE_FULL");
  EXPECT_EQ(full.message, "queue full (limit 8)");
  EXPECT_TRUE(full.retry_delay.has_value());
  const RequestError capacity = ErrorFromSubmit(WithReason(
      absl::InvalidArgumentError("request needs 9 KV blocks, 8 exist"), "KV_CAPACITY_EXCEEDED"));
  EXPECT_EQ(capacity.code, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(capacity.message, "request needs 9 KV blocks, 8 exist");
}

TEST(StatusMappingTest, SubmitErrorsNameFieldLimitAndValue) {
  const google::rpc::Status invalid = ToRpcStatus(ErrorFromSubmit(
      WithSubject(WithReason(absl::InvalidArgumentError("prompt: no room for output"),
                             "CONTEXT_LENGTH_EXCEEDED"),
                  {.field = "prompt", .limit = 64, .got = 70})));
  const auto info = FindDetail<google::rpc::ErrorInfo>(invalid);
  ASSERT_TRUE(info.has_value());
  ASSERT_EQ(info->metadata().size(), 3u);
  EXPECT_EQ(info->metadata().at("field"), "prompt");
  EXPECT_EQ(info->metadata().at("limit"), "64");
  EXPECT_EQ(info->metadata().at("got"), "70");
  const auto bad_request = FindDetail<google::rpc::BadRequest>(invalid);
  ASSERT_TRUE(bad_request.has_value());
  ASSERT_EQ(bad_request->field_violations_size(), 1);
  EXPECT_EQ(bad_request->field_violations(0).field(), "prompt");
  EXPECT_EQ(bad_request->field_violations(0).description(), "no room for output");
}

TEST(StatusMappingTest, OnlyInvalidArgumentsHaveABadRequest) {
  const google::rpc::Status duplicate = ToRpcStatus(ErrorFromSubmit(WithSubject(
      WithReason(absl::AlreadyExistsError("request_id: already running"), "DUPLICATE_REQUEST_ID"),
      {.field = "request_id"})));
  EXPECT_EQ(FindDetail<google::rpc::ErrorInfo>(duplicate)->metadata().at("field"), "request_id");
  EXPECT_FALSE(FindDetail<google::rpc::BadRequest>(duplicate).has_value());
  const google::rpc::Status full = ToRpcStatus(ErrorFromSubmit(
      WithSubject(WithReason(absl::ResourceExhaustedError("queue full (limit 8)"), "QUEUE_FULL"),
                  {.limit = 8})));
  const auto info = FindDetail<google::rpc::ErrorInfo>(full);
  ASSERT_EQ(info->metadata().size(), 1u);
  EXPECT_EQ(info->metadata().at("limit"), "8");
  EXPECT_FALSE(FindDetail<google::rpc::BadRequest>(full).has_value());
}

TEST(StatusMappingTest, InternalTextsDoNotReachTheClient) {
  const RequestError submit =
      ErrorFromSubmit(absl::InternalError("block table 0x7f00 of user prompt"));
  EXPECT_EQ(submit.message, "internal error");
  FinishedEvent event;
  event.status = absl::InternalError("kernel said: secret");
  EXPECT_EQ(ErrorFromFinished(event).message, "internal error");
  event.status = absl::UnavailableError("device 3 fell off the bus");
  event.error_reason = "ENGINE_FAILED";
  EXPECT_EQ(ErrorFromFinished(event).message, "engine failed");
}

TEST(StatusMappingTest, CodeNamesAreThoseOfGrpc) {
  EXPECT_STREQ(StatusCodeName(0), "OK");
  EXPECT_STREQ(StatusCodeName(8), "RESOURCE_EXHAUSTED");
  EXPECT_STREQ(StatusCodeName(16), "UNAUTHENTICATED");
  EXPECT_STREQ(StatusCodeName(17), "UNKNOWN");
  EXPECT_STREQ(StatusCodeName(-1), "UNKNOWN");
}

}  // namespace
}  // namespace flashquant
