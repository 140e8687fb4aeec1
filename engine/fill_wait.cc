#include "engine/fill_wait.h"

#include <algorithm>

namespace flashquant {
namespace {

// Weight of the newest value in the running means: the last ten or so count.
constexpr int kWeight = 8;

Duration Mean(Duration mean, Duration newest) { return mean + (newest - mean) / kWeight; }

}  // namespace

void FillWait::Arrived(TimePoint now, int64_t count) {
  if (last_arrival_.has_value()) {
    const Duration interval = (now - *last_arrival_) / count;
    mean_interval_ = Mean(mean_interval_.value_or(interval), interval);
  }
  last_arrival_ = now;
}

void FillWait::StepFinished(StepPhase phase, TimePoint now, Duration duration) {
  last_tokens_ = now;
  if (phase != StepPhase::kDecode) return;
  mean_step_ = mean_step_ == Duration::zero() ? duration : Mean(mean_step_, duration);
}

std::optional<TimePoint> FillWait::Until(TimePoint now, int32_t rows_to_fill) {
  if (longest_ == Duration::zero() || rows_to_fill == 0) {
    began_.reset();
    return std::nullopt;
  }
  if (!began_.has_value()) began_ = now;
  const TimePoint until = std::min(*began_ + longest_, last_tokens_ + gap_target_ - mean_step_);
  const bool worth_it = mean_interval_.has_value() && *began_ + *mean_interval_ <= until;
  if (worth_it && now < until) return until;
  began_.reset();
  return std::nullopt;
}

}  // namespace flashquant
