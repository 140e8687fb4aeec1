// gtest matchers for absl::Status and absl::StatusOr; this Abseil has none.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"

namespace flashquant {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& value) {
  return value.status();
}

MATCHER(IsOk, "is OK") {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).ok();
}

// StatusIs(code, HasSubstr("...")).
MATCHER_P2(StatusIs, code, message_matcher, "has the code and a message that matches") {
  const absl::Status& status = StatusOf(arg);
  *result_listener << status.ToString();
  return status.code() == code &&
         testing::ExplainMatchResult(message_matcher, std::string(status.message()),
                                     result_listener);
}

}  // namespace flashquant

#define FQ_EXPECT_OK(expr) EXPECT_THAT(expr, ::flashquant::IsOk())
#define FQ_ASSERT_OK(expr) ASSERT_THAT(expr, ::flashquant::IsOk())
