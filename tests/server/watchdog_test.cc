// When a step counts as stuck, and that a probe tells a deaf listener from a living one.
#include "server/watchdog.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <vector>

#include "gtest/gtest.h"
#include "server/listener_probe.h"
#include "server/shutdown.h"

namespace flashquant {
namespace {

using namespace std::chrono_literals;

class StuckStepTest : public ::testing::Test {
 protected:
  bool Look(bool in_step, int64_t turns, Duration later) {
    now_ += later;
    return detector_.Look({in_step, turns}, now_);
  }
  TimePoint now_{1000s};
  StuckStepDetector detector_{10s, 1s};
};

TEST_F(StuckStepTest, StepThatTakesTheWholeLimitIsStuck) {  // S16, G7
  EXPECT_FALSE(Look(true, 5, 1s));
  for (int i = 1; i < 10; ++i) EXPECT_FALSE(Look(true, 5, 1s)) << i;
  EXPECT_TRUE(Look(true, 5, 1s));
}

TEST_F(StuckStepTest, StepsThatEndAreNotStuck) {
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(Look(true, i / 5, 1s)) << i;
}

TEST_F(StuckStepTest, IdleEngineIsNotStuck) {
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(Look(false, 7, 1s)) << i;
  // Nor does idle time count for the step that comes then.
  EXPECT_FALSE(Look(true, 7, 1s));
  for (int i = 1; i < 10; ++i) EXPECT_FALSE(Look(true, 7, 1s)) << i;
}

TEST_F(StuckStepTest, StoppedProcessIsNotStuck) {  // L8
  EXPECT_FALSE(Look(true, 5, 1s));
  EXPECT_FALSE(Look(true, 5, 3600s));
  EXPECT_FALSE(Look(true, 5, 1s));
  EXPECT_FALSE(Look(true, 6, 1s));
}

TEST(PeriodicCheckTest, RunsUntilItsCheckSaysSo) {
  Mutex mu;
  CondVar changed;
  int calls = 0;
  PeriodicCheck check(1ms, [&] {
    MutexLock lock(&mu);
    changed.NotifyAll();
    return ++calls == 3;
  });
  MutexLock lock(&mu);
  while (calls < 3) ASSERT_TRUE(changed.WaitUntil(&mu, std::chrono::steady_clock::now() + 20s));
}

TEST(WatchListenerTest, ThreeFailuresInARowAreDeaf) {  // N11
  const std::vector<bool> script = {false, false, true, false, false, false};
  Mutex mu;
  CondVar changed;
  size_t looks = 0;
  bool deaf = false;
  const auto watch = WatchListenerAnswers(
      1ms, [&] { return script.at(looks++); },
      [&] {
        MutexLock lock(&mu);
        deaf = true;
        changed.NotifyAll();
      });
  MutexLock lock(&mu);
  while (!deaf) ASSERT_TRUE(changed.WaitUntil(&mu, std::chrono::steady_clock::now() + 20s));
  EXPECT_EQ(looks, script.size());
}

TEST(HardExitTimerDeathTest, EndsAProcessWhoseShutdownHangs) {  // L10
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        const HardExitTimer timer(10ms, 70);
        Mutex mu;
        CondVar never;
        MutexLock lock(&mu);
        for (;;) never.Wait(&mu);
      },
      ::testing::ExitedWithCode(70), "shutdown hangs, ending the process");
  const HardExitTimer in_time(3600s, 70);  // does nothing
}

TEST(PeriodicCheckTest, EndsWhileItWaits) {
  const PeriodicCheck check(3600s, [] { return false; });
}

TEST(ListenerProbeTest, PortThatAcceptsButNeverAnswersIsDeaf) {  // N11
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  socklen_t size = sizeof(address);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const int port = ntohs(address.sin_port);
  EXPECT_FALSE(ListenerAnswers("127.0.0.1", port, false, 50ms));
  EXPECT_FALSE(ListenerAnswers("0.0.0.0", port, true, 50ms));
  close(listener);
  EXPECT_FALSE(ListenerAnswers("127.0.0.1", port, false, 50ms));  // nobody there
}

}  // namespace
}  // namespace flashquant
