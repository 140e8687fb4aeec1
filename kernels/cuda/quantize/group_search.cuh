// The search for a group's scale and zero point on a GPU: GroupQuantizer
// (engine/quantize/int4_quantizer.h) by half a warp (half_warp_group.cuh), over the same grid and
// by the same decisions.
#pragma once

#include "kernels/cuda/quantize/half_warp_group.cuh"

namespace flashquant::cuda {

template <int kPer>
class GroupSearch : public HalfWarpGroup<kPer> {
  using Base = HalfWarpGroup<kPer>;
  using Base::count_;
  using Base::half_;
  using Base::importance_;
  using Base::inside_;
  using Base::lane_;
  using Base::num_outside_;
  using Base::peak_;
  using Base::scratch_;
  using Base::squared_;
  using Base::symmetric_;
  using Base::weight_;

 public:
  using Base::Base;
  using Base::LargestErrors;

  // Leaves error(j) and params(j) for j = 0 .. length - 1 left-out weights.
  __device__ void ErrorCurve(int length) {
    for (int j = lane_; j < length; j += kHalf) {
      scratch_.errors[j] = CUDART_INF;
      scratch_.params[j] = WordOf(GroupParams());
    }
#pragma unroll
    for (int u = 0; u < kOwned; ++u) {
      approximate_[u] = CUDART_INF_F;
      candidate_[u] = WordOf(GroupParams());
    }
    __syncwarp(half_);
    const int max_outliers = length - 1;
    const Shape shape = ShapeOf(max_outliers);
    if (shape.num_nonzero == 0 || fmaxf(-shape.low, shape.high) < kTinyWeight) {
      const double error = Error(GroupParams(), 0);
      if (lane_ == 0) scratch_.errors[0] = error;
      __syncwarp(half_);
      return;
    }
    SearchGrid(shape, length);
    MakeExact(length);
    __syncwarp(half_);  // every lane has read the errors that are overwritten now
    for (int j = shape.num_nonzero + 1 + lane_; j < length; j += kHalf) {
      scratch_.errors[j] = CUDART_INF;
    }
    __syncwarp(half_);
  }

  // Returns the error reached.
  __device__ double Refine(int num_outliers, GroupParams* params) {
    const double before = Error(*params, num_outliers);
    if (FloatOf(params->scale) == 0.0f) return before;
    const GroupParams given = *params;
    Judge(given, count_);
    float best = ErrorWithout(num_outliers);
    for (int shift = -1; shift <= 1; ++shift) {
      const int zero = given.zero + shift;
      if (zero < 0 || zero > 15 || (symmetric_ && shift != 0)) continue;
      for (int step = -group_search::kSweepSteps; step <= group_search::kSweepSteps; ++step) {
        Compare(NextScale(given.scale, step), zero, num_outliers, &best, params);
      }
    }
    for (int round = 0; round < group_search::kRefineRounds; ++round) {
      const GroupParams start = *params;
      FitScales(num_outliers, &best, params);
      if (WordOf(*params) == WordOf(start)) break;
    }
    const double after = Error(*params, num_outliers);
    if (after <= before) return after;
    *params = given;
    return before;
  }

  __device__ double error(int j) const { return scratch_.errors[j]; }
  __device__ GroupParams params(int j) const { return ParamsOf(scratch_.params[j]); }

 private:
  using Base::Error;
  using Base::ErrorWithout;
  using Base::Judge;
  using Base::Measure;
  using Base::Sum;
  using Base::SumOfRest;
  using Base::TakeLargest;

  static constexpr int kOwned = (kMaxLength + kHalf - 1) / kHalf;  // of a curve, by one lane

  struct Shape {
    float low, high, inner_low, inner_high;
    int num_nonzero;
  };

  __device__ static BFloat16 NextScale(BFloat16 scale, int steps) {
    BFloat16 next;
    next.bits = static_cast<uint16_t>(min(max(static_cast<int>(scale.bits) + steps, 1), 0x7f7f));
    return next;
  }

  __device__ Shape ShapeOf(int max_outliers) const {
    const int cut = min(max_outliers, (count_ - 1) / 2);
    Shape shape;
    shape.low = fminf(scratch_.values[0], 0.0f);
    shape.high = fmaxf(scratch_.values[count_ - 1], 0.0f);
    shape.inner_low = fminf(scratch_.values[cut], 0.0f);
    shape.inner_high = fmaxf(scratch_.values[count_ - 1 - cut], 0.0f);
    int nonzero = 0;
#pragma unroll
    for (int v = 0; v < kPer; ++v) nonzero += IsZeroAsBFloat16(weight_[v]) ? 0 : 1;
    shape.num_nonzero = Sum(nonzero);  // padding is zero
    return shape;
  }

  __device__ void SearchGrid(const Shape& shape, int length) {
    const float divisor = symmetric_ ? 7.0f : 15.0f;
    const float widest =
        symmetric_ ? __fdiv_rn(fmaxf(-shape.low, shape.high), divisor)
                   : __fadd_rn(__fdiv_rn(shape.high, divisor), -__fdiv_rn(shape.low, divisor));
    const float narrow = symmetric_ ? __fdiv_rn(fmaxf(-shape.inner_low, shape.inner_high), 8.0f)
                                    : __fadd_rn(__fdiv_rn(shape.inner_high, divisor),
                                                -__fdiv_rn(shape.inner_low, divisor));
    const float above = count_ > group_search::kSmallGroup ? group_search::kAboveWidest
                                                           : group_search::kAboveWidestSmall;
    const double below =
        group_search::kBelowNarrow +
        group_search::kBelowPerOutlier * min(length - 1, group_search::kBelowMaxOutliers);
    const double most =
        static_cast<double>(fmaxf(__fmul_rn(above, widest), group_search::kMinScale));
    const double least =
        fmax(fmax(below * static_cast<double>(narrow), most * group_search::kLeastScaleShare),
             static_cast<double>(group_search::kMinScale));
    const float inner_ends = __fadd_rn(shape.inner_low, shape.inner_high);
    const float ends = __fadd_rn(shape.low, shape.high);
    uint16_t previous = 0;
    for (double scale = most; scale >= least * 0.999; scale /= group_search::kScaleStep) {
      const BFloat16 rounded = RoundToBFloat16(static_cast<float>(scale));
      if (rounded.bits == previous) continue;
      previous = rounded.bits;
      SearchZeroPoints(rounded, inner_ends, ends, length);
    }
  }

  __device__ static int ZeroFor(float centre, float scale) {
    const float zero = __fadd_rn(7.5f, -__fdiv_rn(centre, scale));
    return static_cast<int>(__fadd_rn(fminf(fmaxf(zero, 0.0f), 15.0f), 0.5f));
  }

  __device__ void SearchZeroPoints(BFloat16 scale, float inner_ends, float ends, int length) {
    if (symmetric_) {
      TryCandidate(scale, 8, length);
      return;
    }
    const int inner = ZeroFor(__fmul_rn(0.5f, inner_ends), FloatOf(scale));
    const int outer = ZeroFor(__fmul_rn(0.5f, ends), FloatOf(scale));
    const int first = min(inner, outer);
    const int last = max(inner, outer);
    for (int zero = first; zero <= last; ++zero) TryCandidate(scale, zero, length);
    for (int direction = 1; direction >= -1; direction -= 2) {
      int useless = 0;
      for (int zero = direction > 0 ? last + 1 : first - 1;
           zero >= 0 && zero <= 15 && useless < group_search::kPatience; zero += direction) {
        useless = TryCandidate(scale, zero, length) ? 0 : useless + 1;
      }
    }
  }

  __device__ bool Offer(int j, float error, GroupParams candidate) {
    bool improved = false;
#pragma unroll
    for (int u = 0; u < kOwned; ++u) {
      if (j != u * kHalf + lane_ || !(error < approximate_[u])) continue;
      approximate_[u] = error;
      candidate_[u] = WordOf(candidate);
      improved = true;
    }
    return improved;
  }

  __device__ bool TryCandidate(BFloat16 scale, int zero, int length) {
    GroupParams candidate;
    candidate.scale = scale;
    candidate.zero = static_cast<uint8_t>(zero);
    if (!Judge(candidate, length + count_ / 8)) return false;
    bool improved = false;
    float error = inside_;
    for (int j = num_outside_;; --j) {
      if (j < length) improved |= Offer(j, error, candidate);
      if (j == 0) break;
      error = __fadd_rn(error, scratch_.outside[j - 1]);
    }
    error = inside_;
    for (int j = num_outside_ + 1; j < length; ++j) {
      error = fmaxf(__fadd_rn(error, -EstimateInside(j - 1 - num_outside_)), 0.0f);
      improved |= Offer(j, error, candidate);
    }
    return __any_sync(half_, improved) != 0;
  }

  __device__ float EstimateInside(int i) const {
    const float rank = __fdiv_rn(static_cast<float>(i), static_cast<float>(count_));
    const float mean = __fdiv_rn(inside_, static_cast<float>(count_));
    if (rank >= 1.0f) return 0.0f;
    const float left = __fadd_rn(1.0f, -rank);
    return __fmul_rn(__fmul_rn(__fmul_rn(peak_, mean), left), left);
  }

  // What is reported is exact.
  __device__ void MakeExact(int length) {
#pragma unroll
    for (int u = 0; u < kOwned; ++u) {
      const int j = u * kHalf + lane_;
      if (j >= length) continue;
      scratch_.approximate[j] = approximate_[u];
      scratch_.candidates[j] = candidate_[u];
    }
    __syncwarp(half_);
    for (int j = 0; j < length;) {
      int end = j + 1;
      while (end < length && scratch_.candidates[end] == scratch_.candidates[j]) ++end;
      if (isfinite(scratch_.approximate[j])) {
        AddExactCurve(ParamsOf(scratch_.candidates[j]),
                      min(end + group_search::kBeyond, length) - 1);
      }
      j = end;
    }
    for (int j = 1; j < length; ++j) {
      if (scratch_.errors[j] > scratch_.errors[j - 1])
        AddExactCurve(ParamsOf(scratch_.params[j - 1]), j);
    }
  }

  __device__ void AddExactCurve(GroupParams candidate, int last) {
    const int most = min(last, count_);
    Measure(candidate);
    for (int n = 0; n < most; ++n) {
      const float largest = TakeLargest(squared_);
      if (lane_ == 0) scratch_.clipped[n] = largest;
    }
    double error = SumOfRest();
    __syncwarp(half_);
    if (lane_ == 0) {
      for (int j = most;; --j) {
        if (error < scratch_.errors[j]) {
          scratch_.errors[j] = error;
          scratch_.params[j] = WordOf(candidate);
        }
        if (j == 0) break;
        error += static_cast<double>(scratch_.clipped[j - 1]);
      }
    }
    __syncwarp(half_);
  }

  __device__ void Compare(BFloat16 scale, int zero, int num_outliers, float* best,
                          GroupParams* params) {
    if (FloatOf(scale) < group_search::kMinScale) return;
    GroupParams candidate;
    candidate.scale = scale;
    candidate.zero = static_cast<uint8_t>(zero);
    if (!Judge(candidate, count_)) return;
    const float error = ErrorWithout(num_outliers);
    if (!(error < *best)) return;
    *best = error;
    *params = candidate;
  }

  __device__ void FitScales(int num_outliers, float* best, GroupParams* params) {
    const GroupParams start = *params;
    const uint32_t left_out = num_outliers > 0 ? LargestErrors(start, num_outliers) : 0;
    const Levels levels = LevelsOf(start);
    for (int shift = -1; shift <= 1; ++shift) {
      const int zero = static_cast<int>(start.zero) + shift;
      if (zero < 0 || zero > 15 || (symmetric_ && shift != 0)) continue;
      Levels shifted = levels;
      shifted.zero = static_cast<float>(zero);
      double weight_level = 0;
      double level_level = 0;
#pragma unroll
      for (int v = 0; v < kPer; ++v) {
        const float kept = (left_out >> v & 1u) != 0 ? 0.0f : weight_[v];
        const double level = static_cast<double>(__fadd_rn(CodeOf(kept, shifted), -shifted.zero));
        const double importance = static_cast<double>(importance_[v]);
        weight_level += importance * static_cast<double>(kept) * level;
        level_level += importance * level * level;
      }
      weight_level = Sum(weight_level);
      level_level = Sum(level_level);
      if (!(level_level > 0 && weight_level > 0)) continue;
      const BFloat16 fitted = RoundToBFloat16(
          fmaxf(static_cast<float>(weight_level / level_level), group_search::kMinScale));
      for (int step = -1; step <= 1; ++step) {
        Compare(NextScale(fitted, step), zero, num_outliers, best, params);
      }
    }
  }

  // Of the grid: entries lane, lane + 16, ... of the curve.
  float approximate_[kOwned];
  uint32_t candidate_[kOwned];
};

}  // namespace flashquant::cuda
