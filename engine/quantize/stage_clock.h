// StageClock: adds the time that it lives to a sum.
#pragma once

#include <chrono>

namespace flashquant {

class StageClock final {
 public:
  explicit StageClock(double* seconds)
      : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
  ~StageClock() {
    *seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  StageClock(const StageClock&) = delete;
  StageClock& operator=(const StageClock&) = delete;

 private:
  double* const seconds_;
  const std::chrono::steady_clock::time_point start_;
};

}  // namespace flashquant
