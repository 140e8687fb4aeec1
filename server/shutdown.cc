// POSIX signals and limits.
#include "server/shutdown.h"

#include <signal.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr rlim_t kLeastOpenFiles = 4096;
constexpr rlim_t kWantedOpenFiles = 65536;
// How often the signal thread looks whether it should end, and the drain whether it should hurry.
constexpr auto kPollInterval = std::chrono::milliseconds(50);

sigset_t WatchedSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGUSR1);
  sigaddset(&signals, SIGHUP);
  return signals;
}

}  // namespace

SignalWatcher::SignalWatcher() {
  signal(SIGPIPE, SIG_IGN);
  const sigset_t signals = WatchedSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  thread_ = std::thread([this] { Run(); });
}

SignalWatcher::~SignalWatcher() {
  stop_.store(true);
  thread_.join();
}

void SignalWatcher::Run() {
  const sigset_t signals = WatchedSignals();
  const timespec interval = {0, std::chrono::nanoseconds(kPollInterval).count()};
  while (!stop_.load()) {
    const int signal_number = sigtimedwait(&signals, nullptr, &interval);
    if (signal_number < 0) continue;
    MutexLock lock(&mu_);
    if (signal_number == SIGUSR1) {
      dump_requested_ = true;
    } else if (signal_number == SIGHUP) {
      reload_requested_ = true;
    } else {
      ++stop_signals_;
    }
    changed_.NotifyAll();
  }
}

int SignalWatcher::stop_signals() {
  MutexLock lock(&mu_);
  return stop_signals_;
}

bool SignalWatcher::TakeDumpRequest() {
  MutexLock lock(&mu_);
  return std::exchange(dump_requested_, false);
}

bool SignalWatcher::TakeReloadRequest() {
  MutexLock lock(&mu_);
  return std::exchange(reload_requested_, false);
}

void SignalWatcher::Notify() {
  MutexLock lock(&mu_);
  changed_.NotifyAll();
}

void SignalWatcher::WaitUntil(const std::function<bool()>& done) {
  while (!done()) {
    MutexLock lock(&mu_);
    // A notice between done() and here is not lost for long.
    changed_.WaitUntil(&mu_, std::chrono::steady_clock::now() + kPollInterval);
  }
}

HardExitTimer::HardExitTimer(Duration limit, int exit_code)
    : thread_([this, limit, exit_code] {
        const TimePoint deadline = std::chrono::steady_clock::now() + limit;
        MutexLock lock(&mu_);
        while (!cancelled_) {
          if (changed_.WaitUntil(&mu_, deadline) || cancelled_) continue;
          if (exit_code != 0) {
            std::fprintf(stderr, "flashquant: shutdown hangs, ending the process\n");
          }
          _exit(exit_code);
        }
      }) {}

HardExitTimer::~HardExitTimer() {
  {
    MutexLock lock(&mu_);
    cancelled_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

bool DrainServer(InferenceServer* server, Engine* engine, TimePoint deadline,
                 const std::function<bool()>& hurry) {
  server->SetDraining();
  bool ended = server->live_calls() == 0;
  while (!ended && !hurry()) {
    const TimePoint now = std::chrono::steady_clock::now();
    if (now >= deadline) break;
    ended = server->WaitUntilNoCalls(std::min<TimePoint>(deadline, now + kPollInterval));
  }
  const TimePoint now = std::chrono::steady_clock::now();
  if (engine != nullptr) engine->Drain(now);
  // The last messages of those that were ended just now; then gRPC cancels what is left.
  server->WaitUntilNoCalls(now + std::chrono::seconds(1));
  server->Shutdown(std::chrono::steady_clock::now() + std::chrono::milliseconds(200));
  return ended;
}

namespace {

// All that a signal handler may touch.
char crash_line_end[128];

void OnCrash(int signal_number) {
  // Formatted by hand: next to nothing may be called here.
  char line[256] = "flashquant: crashed by signal ";
  size_t size = std::strlen(line);
  if (signal_number >= 10) line[size++] = static_cast<char>('0' + signal_number / 10);
  line[size++] = static_cast<char>('0' + signal_number % 10);
  for (const char* c = crash_line_end; *c != '\0' && size < sizeof(line); ++c) line[size++] = *c;
  const ssize_t written = write(STDERR_FILENO, line, size);
  (void)written;  // nobody is left to be told
  // The handler is gone (SA_RESETHAND): the signal ends the process now.
  raise(signal_number);
}

}  // namespace

void InstallCrashHandler(const std::string& build, bool core_files) {
  const std::string end = " (" + build.substr(0, 100) + ")\n";
  std::memcpy(crash_line_end, end.c_str(), end.size() + 1);
  struct sigaction action {};
  action.sa_handler = OnCrash;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
  for (const int signal_number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) {
    sigaction(signal_number, &action, nullptr);
  }
  if (core_files) return;
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
}

absl::Status RaiseOpenFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return ResourceExhaustedError("open files: cannot read the limit");
  }
  if (limit.rlim_max < kLeastOpenFiles) {
    return ResourceExhaustedError("open files: hard limit too low (needed {}, got {}): ulimit -Hn",
                                  kLeastOpenFiles, limit.rlim_max);
  }
  const rlim_t wanted = std::min(limit.rlim_max, kWantedOpenFiles);
  if (limit.rlim_cur >= wanted) return absl::OkStatus();
  limit.rlim_cur = wanted;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return ResourceExhaustedError("open files: cannot raise the limit to {}", wanted);
  }
  return absl::OkStatus();
}

}  // namespace flashquant
