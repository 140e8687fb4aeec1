// How far an off-line command has come, on standard error.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace flashquant {

// A bar that is redrawn on a terminal; else a line for every tenth.
class ProgressPrinter final {
 public:
  explicit ProgressPrinter(bool quiet);

  // A message that follows begins on a line of its own.
  ~ProgressPrinter();
  ProgressPrinter(const ProgressPrinter&) = delete;
  ProgressPrinter& operator=(const ProgressPrinter&) = delete;

  void Show(int64_t done, int64_t total, const std::string& tensor);

 private:
  const bool quiet_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point start_;
  int tenths_ = 0;
  bool bar_open_ = false;
};

}  // namespace flashquant
