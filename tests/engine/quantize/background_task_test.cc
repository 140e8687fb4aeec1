// One piece of work beside the caller: waited for, its status handed over once.
#include "engine/quantize/background_task.h"

#include <atomic>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

TEST(BackgroundTaskTest, WaitGivesWhatTheWorkReturnedOnce) {
  BackgroundTask task;
  FQ_EXPECT_OK(task.Wait());  // none yet
  task.Start([] { return DataLossError("tensor {}", 7); });
  EXPECT_THAT(task.Wait(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("tensor 7")));
  FQ_EXPECT_OK(task.Wait());
  int done = 0;
  for (int i = 0; i < 3; ++i) {
    task.Start([&] {
      ++done;
      return absl::OkStatus();
    });
    FQ_EXPECT_OK(task.Wait());
    EXPECT_EQ(done, i + 1);
  }
}

TEST(BackgroundTaskTest, TheWorkRunsBesideTheCallerAndEndsBeforeTheTask) {
  std::atomic<bool> may_end{false};
  std::atomic<bool> ended{false};
  {
    BackgroundTask task;
    task.Start([&] {
      may_end.wait(false);
      ended = true;
      return absl::OkStatus();
    });
    EXPECT_FALSE(ended);
    may_end = true;
    may_end.notify_all();
  }
  EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace flashquant
