// The error macros: values and errors travel as promised, and each expression runs once.
#include "kernels/base/status_macros.h"

#include <memory>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

absl::StatusOr<std::unique_ptr<int>> MakeNumber(bool fail, int& calls) {
  ++calls;
  if (fail) return NotFoundError("number {} of {}", 3, "list");
  return std::make_unique<int>(42);
}

absl::StatusOr<int> ReadNumber(bool fail, int& calls) {
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<int> number, MakeNumber(fail, calls));
  return *number;
}

absl::Status Check(bool fail, int& calls, bool& reached_end) {
  FQ_RETURN_IF_ERROR(MakeNumber(fail, calls).status());
  reached_end = true;
  return absl::OkStatus();
}

TEST(StatusMacrosTest, AssignOrReturnMovesTheValueOrPassesTheErrorUp) {
  int calls = 0;
  EXPECT_EQ(ReadNumber(false, calls).value(), 42);
  const absl::Status status = ReadNumber(true, calls).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "number 3 of list");
  EXPECT_EQ(calls, 2);
}

TEST(StatusMacrosTest, ReturnIfErrorStopsAtTheError) {
  int calls = 0;
  bool reached_end = false;
  EXPECT_FALSE(Check(true, calls, reached_end).ok());
  EXPECT_FALSE(reached_end);
  EXPECT_TRUE(Check(false, calls, reached_end).ok());
  EXPECT_TRUE(reached_end);
  EXPECT_EQ(calls, 2);
}

TEST(StatusMacrosTest, AnnotateKeepsTheCodeAndLeavesOkAlone) {
  const absl::Status status = Annotate(DataLossError("row {}", 7), "tensor x");
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "tensor x: row 7");
  EXPECT_TRUE(Annotate(absl::OkStatus(), "tensor x").ok());
}

}  // namespace
}  // namespace flashquant
