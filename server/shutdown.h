// Ending well: signals as events, the drain, and the timer that ends a process that hangs.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "engine/base/clock.h"
#include "engine/engine.h"
#include "kernels/base/mutex.h"
#include "server/inference_server.h"

namespace flashquant {

// Turns SIGTERM, SIGINT, SIGUSR1 and SIGHUP into counters that a thread can wait for. SIGPIPE is
// ignored. To be made before any other thread, because threads inherit the blocked signals.
class SignalWatcher final {
 public:
  SignalWatcher();
  ~SignalWatcher();

  // SIGTERM and SIGINT so far. Any thread.
  int stop_signals();
  // Whether SIGUSR1 came since the last call.
  bool TakeDumpRequest();
  // Whether SIGHUP came since the last call.
  bool TakeReloadRequest();
  // For events that the same thread waits for. Any thread.
  void Notify();
  // Waits until `done` is true; it is asked after each signal and Notify.
  void WaitUntil(const std::function<bool()>& done);

 private:
  void Run();

  std::atomic<bool> stop_{false};
  Mutex mu_;
  CondVar changed_;
  int stop_signals_ ABSL_GUARDED_BY(mu_) = 0;
  bool dump_requested_ ABSL_GUARDED_BY(mu_) = false;
  bool reload_requested_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// Ends the process with `exit_code` when it still lives after `limit`, and says so unless that is
// 0: gRPC's Shutdown waits for ever for a call that never finishes. Destroyed in time, it does
// nothing.
class HardExitTimer final {
 public:
  HardExitTimer(Duration limit, int exit_code);
  ~HardExitTimer();

 private:
  Mutex mu_;
  CondVar changed_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// Refuses new calls, lets running ones end until `deadline` or until `hurry` is true, then ends the
// rest with UNAVAILABLE (DRAINING), and closes the listener. Returns whether all ended by
// themselves. `engine` may be null (the model was never there).
bool DrainServer(InferenceServer* server, Engine* engine, TimePoint deadline,
                 const std::function<bool()>& hurry);

// A crash (SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT) leaves one line with the signal and `build` on
// stderr, then ends the process by that signal. No core file is written, because prompts would be
// in it, unless `core_files`. Once, early; `build` is copied.
void InstallCrashHandler(const std::string& build, bool core_files);

// Raises the limit of open files to the hard limit (at most 65536). RESOURCE_EXHAUSTED when that is
// below 4096: one time without a descriptor and gRPC 1.51 never accepts again.
absl::Status RaiseOpenFileLimit();

}  // namespace flashquant
