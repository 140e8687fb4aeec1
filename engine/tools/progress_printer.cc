#include "engine/tools/progress_printer.h"

#include <unistd.h>

#include <cstdio>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

std::string TimeText(double seconds) {
  const int64_t whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{}:{:02} min", whole / 60, whole % 60);
  return fmt::format("{}:{:02} h", whole / 3600, whole % 3600 / 60);
}

}  // namespace

ProgressPrinter::ProgressPrinter(bool quiet)
    : quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()) {}

ProgressPrinter::~ProgressPrinter() {
  if (bar_open_) fmt::print(stderr, "\n");
}

void ProgressPrinter::Show(int64_t done, int64_t total, const std::string& tensor) {
  if (quiet_ || total == 0) return;
  const double share = static_cast<double>(done) / static_cast<double>(total);
  const double elapsed =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  std::string time = "";
  if (done > 0 && done < total) time = TimeText(elapsed * (1 / share - 1)) + " left";
  if (done == total) time = TimeText(elapsed);
  if (terminal_) {
    constexpr int kWidth = 30;
    const int filled = static_cast<int>(share * kWidth);
    fmt::print(stderr, "\r[{:=<{}}{:<{}}] {:3.0f}%  {:<14} {:<44.44}", "", filled, "",
               kWidth - filled, 100 * share, time, tensor);
    bar_open_ = done != total;
    if (!bar_open_) fmt::print(stderr, "\n");
  } else if (static_cast<int>(share * 10) > tenths_) {
    tenths_ = static_cast<int>(share * 10);
    fmt::print(stderr, "quantized {:.0f}% of the weights, {}\n", 100 * share, time);
  }
  std::fflush(stderr);
}

}  // namespace flashquant
