// StreamPrinter: what `flashquant generate` shows of an answer: its text or, as JSON, its messages
// on stdout as they come, and a line of figures on stderr at the end.
#pragma once

#include <chrono>
#include <optional>

#include "flashquant/v1/inference.pb.h"

namespace flashquant {

// One thread; the clock of the first token starts with the object.
class StreamPrinter final {
 public:
  // json: one object a line instead of text.
  explicit StreamPrinter(bool json) : json_(json) {}

  // False when nobody reads stdout any more: cancel the call.
  bool Print(const v1::GenerateResponse& response);
  // The figures; nothing when the stream had no last message.
  void PrintSummary() const;

  bool finished() const { return finished_.has_value(); }

 private:
  const bool json_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::optional<std::chrono::steady_clock::time_point> first_delta_;
  std::optional<v1::Finished> finished_;
};

}  // namespace flashquant
