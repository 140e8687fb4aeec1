// A group of weights held by the 16 lanes of half a warp, for judging one (scale, zero point) after
// the other: SortedGroup (engine/quantize/sorted_group.h) on a GPU. The search itself is
// group_search.cuh.
//
// The lanes stand for the 16 lanes of the host's vectors and add in their order, so that a
// candidate is judged by the same bits. Weight i of the group belongs to lane i % 16. All functions
// are called by all lanes of the half with the same arguments and give all of them the same result.
#pragma once

#include <cuda_runtime.h>
#include <math_constants.h>

#include <cstdint>

#include "kernels/cuda/quantize/rounding.cuh"

namespace flashquant::cuda {

constexpr int kHalf = 16;
constexpr int kMaxLength = 33;  // of a curve

// Shared memory of one group. Params as words: shared arrays have no constructors.
template <int kPer>
struct GroupScratch {
  static constexpr int kSize = kHalf * kPer;
  union {
    uint64_t keys[kSize];  // while sorting
    struct {
      float clipped[kSize];
      float outside[kSize];
    };
  };
  double errors[kMaxLength];
  float values[kSize];      // ascending
  float importance[kSize];  // the same order
  uint32_t params[kMaxLength];
  uint32_t candidates[kMaxLength];
  float approximate[kMaxLength];
};

__device__ __forceinline__ uint32_t WordOf(GroupParams params) {
  return params.scale.bits | static_cast<uint32_t>(params.zero) << 16;
}
__device__ __forceinline__ GroupParams ParamsOf(uint32_t word) {
  GroupParams params;
  params.scale.bits = static_cast<uint16_t>(word & 0xffffu);
  params.zero = static_cast<uint8_t>(word >> 16);
  return params;
}

template <int kPer>
class HalfWarpGroup {
 public:
  static constexpr int kSize = kHalf * kPer;

  // weight(i), importance(i): of the group's weights, i < count.
  template <typename Weight, typename Importance>
  __device__ HalfWarpGroup(GroupScratch<kPer>* scratch, int count, bool symmetric, bool weighted,
                           float peak, const Weight& weight, const Importance& importance)
      : scratch_(*scratch),
        lane_(static_cast<int>(threadIdx.x) % kHalf),
        half_(0xffffu << (threadIdx.x % 32 & kHalf)),
        count_(count),
        symmetric_(symmetric),
        weighted_(weighted),
        peak_(peak) {
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      const int i = v * kHalf + lane_;
      weight_[v] = i < count_ ? weight(i) : 0.0f;
      importance_[v] = i < count_ ? importance(i) : 0.0f;
    }
    Sort();
  }

  // Bit v: weight v * 16 + lane is one of the `count` with the largest errors, by the host's order.
  __device__ uint32_t LargestErrors(GroupParams params, int count) {
    Measure(params);
    uint32_t chosen = 0;
    for (int n = 0; n < min(count, count_); ++n) {
      uint64_t best_key = 0;
      uint32_t best_index = kSize;
#pragma unroll
      for (int v = 0; v < kPer; ++v) {
        const int i = v * kHalf + lane_;
        if (i >= count_ || (chosen >> v & 1u) != 0) continue;
        const uint64_t nonzero = IsZeroAsBFloat16(weight_[v]) ? 0 : 1;
        const uint64_t key = nonzero << 63 |
                             static_cast<uint64_t>(__float_as_uint(squared_[v])) << 31 |
                             (__float_as_uint(weight_[v]) & 0x7fffffffu);
        if (best_index == kSize || key > best_key) {
          best_key = key;
          best_index = static_cast<uint32_t>(i);
        }
      }
      for (int width = kHalf / 2; width > 0; width /= 2) {
        const uint64_t key = __shfl_xor_sync(half_, best_key, width);
        const uint32_t index = __shfl_xor_sync(half_, best_index, width);
        if (index != kSize &&
            (best_index == kSize || key > best_key || (key == best_key && index < best_index))) {
          best_key = key;
          best_index = index;
        }
      }
      if (static_cast<int>(best_index % kHalf) == lane_) chosen |= 1u << best_index / kHalf;
    }
    return chosen;
  }

  __device__ int lane() const { return lane_; }

 protected:
  template <typename T>
  __device__ T Sum(T value) const {
    for (int width = kHalf / 2; width > 0; width /= 2) {
      value += __shfl_xor_sync(half_, value, width);
    }
    return value;
  }
  // Every weight's rank by counting; ties by the lower index.
  __device__ void Sort() {
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      const int i = v * kHalf + lane_;
      const uint32_t bits = __float_as_uint(weight_[v]);
      const uint32_t sortable = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
      scratch_.keys[i] =
          i < count_ ? static_cast<uint64_t>(sortable) << 32 | static_cast<uint32_t>(i) : ~0ull - i;
    }
    __syncwarp(half_);
    int rank[kPer] = {};
    uint64_t own[kPer];
#pragma unroll
    for (int v = 0; v < kPer; ++v) own[v] = scratch_.keys[v * kHalf + lane_];
    for (int i = 0; i < kSize; ++i) {
      const uint64_t key = scratch_.keys[i];
#pragma unroll
      for (int v = 0; v < kPer; ++v) rank[v] += key < own[v] ? 1 : 0;
    }
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      const int place = v * kHalf + lane_ < count_ ? rank[v] : v * kHalf + lane_;
      scratch_.values[place] = weight_[v];
      scratch_.importance[place] = importance_[v];
    }
    __syncwarp(half_);
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      sorted_[v] = scratch_.values[v * kHalf + lane_];
      sorted_importance_[v] = scratch_.importance[v * kHalf + lane_];
    }
  }

  // squared_ of all weights under `params`, times their importance; -1 for padding.
  __device__ void Measure(GroupParams params) {
    const Levels levels = LevelsOf(params);
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      const float error = __fadd_rn(weight_[v], -ValueOf(CodeOf(weight_[v], levels), levels));
      squared_[v] =
          v * kHalf + lane_ < count_ ? __fmul_rn(__fmul_rn(error, error), importance_[v]) : -1.0f;
    }
  }

  // Takes the largest out of `errors` (-1 in its place) and returns it.
  __device__ float TakeLargest(float (&errors)[kPer]) const {
    uint64_t best = 0;
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      if (errors[v] < 0.0f) continue;
      const uint64_t key = static_cast<uint64_t>(__float_as_uint(errors[v])) << 32 |
                           static_cast<uint32_t>(v * kHalf + lane_ + 1);
      best = key > best ? key : best;
    }
    for (int width = kHalf / 2; width > 0; width /= 2) {
      const uint64_t other = __shfl_xor_sync(half_, best, width);
      best = other > best ? other : best;
    }
    const int index = static_cast<int>(best & 0xffffffffu) - 1;
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      if (index == v * kHalf + lane_) errors[v] = -1.0f;
    }
    return index < 0 ? 0.0f : __uint_as_float(static_cast<uint32_t>(best >> 32));
  }

  __device__ double SumOfRest() const {
    double sum = 0;
#pragma unroll
    for (int v = 0; v < kPer; ++v)
      sum += squared_[v] < 0.0f ? 0.0 : static_cast<double>(squared_[v]);
    return Sum(sum);
  }

  __device__ double Error(GroupParams params, int num_outliers) {
    Measure(params);
    const int left_out = min(num_outliers, count_);
    for (int n = 0; n < left_out; ++n) TakeLargest(squared_);
    return SumOfRest();
  }

  // SortedGroup::Judge.
  __device__ bool Judge(GroupParams params, int most_outside) {
    const Levels levels = LevelsOf(params);
    const float limit =
        __fmul_rn(__fmul_rn(group_search::kInsideLimit, levels.scale), levels.scale);
    if (most_outside < count_ && !weighted_) {
      const float low = -__fmul_rn(levels.scale, __fadd_rn(levels.zero, 0.5001f));
      const float high = __fmul_rn(levels.scale, __fadd_rn(15.5001f, -levels.zero));
      int outside = 0;
#pragma unroll
      for (int v = 0; v < kPer; ++v) {
        if (v * kHalf + lane_ < count_) outside += (sorted_[v] < low) + (sorted_[v] > high);
      }
      if (Sum(outside) > most_outside) return false;
    }
    float sum = 0;
    int first = count_;  // not clipped
    int last = -1;
    float weighted[kPer];
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      const int i = v * kHalf + lane_;
      const float error = __fadd_rn(sorted_[v], -ValueOf(CodeOf(sorted_[v], levels), levels));
      const float squared = __fmul_rn(error, error);
      weighted[v] = __fmul_rn(squared, sorted_importance_[v]);
      inside_errors_[v] = squared > limit ? 0.0f : weighted[v];
      sum = __fadd_rn(sum, inside_errors_[v]);
      if (squared > limit || i >= count_) continue;
      first = min(first, i);
      last = max(last, i);
    }
    inside_ = Sum(sum);
    for (int width = kHalf / 2; width > 0; width /= 2) {
      first = min(first, __shfl_xor_sync(half_, first, width));
      last = max(last, __shfl_xor_sync(half_, last, width));
    }
    // Clipped from below 0 .. first - 1, from above last + 1 .. count - 1.
    const int below = first;
    const int above = first == count_ ? 0 : count_ - 1 - last;
    num_outside_ = 0;
    if (below + above > 0) CollectOutside(weighted, limit, below, above);
    return num_outside_ <= most_outside;
  }

  __device__ void CollectOutside(const float (&weighted)[kPer], float limit, int below, int above) {
    __syncwarp(half_);
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      const int i = v * kHalf + lane_;
      if (i < below) scratch_.clipped[i] = weighted[v];
      if (i >= count_ - above && i < count_) scratch_.clipped[below + count_ - 1 - i] = weighted[v];
    }
    __syncwarp(half_);
    const int count = below + above;
    for (int c = 0; c < count; ++c) {
      const float error = scratch_.clipped[c];
      if (error > limit) {
        ++num_outside_;
      } else {
        inside_ = __fadd_rn(inside_, error);
      }
    }
    for (int c = lane_; c < count; c += kHalf) {
      const float error = scratch_.clipped[c];
      if (!(error > limit)) continue;
      int rank = 0;
      for (int d = 0; d < count; ++d) {
        const float other = scratch_.clipped[d];
        rank += other > limit && (other > error || (other == error && d < c)) ? 1 : 0;
      }
      scratch_.outside[rank] = error;
    }
    __syncwarp(half_);
  }

  // Of the candidate judged last.
  __device__ float ErrorWithout(int left_out) {
    float sum = inside_;
    if (left_out <= num_outside_) {
      for (int i = num_outside_; i > left_out; --i) sum = __fadd_rn(sum, scratch_.outside[i - 1]);
      return sum;
    }
    const int more = left_out - num_outside_;
    if (more >= count_ - num_outside_) return 0.0f;
    for (int i = 0; i < more; ++i) sum = __fadd_rn(sum, -TakeLargest(inside_errors_));
    return fmaxf(sum, 0.0f);
  }

  GroupScratch<kPer>& scratch_;
  const int lane_;
  const unsigned half_;
  const int count_;
  const bool symmetric_;
  const bool weighted_;
  const float peak_;
  float weight_[kPer];  // as given
  float importance_[kPer];
  float sorted_[kPer];
  float sorted_importance_[kPer];
  float squared_[kPer];
  // Of the candidate judged last.
  float inside_errors_[kPer];
  float inside_ = 0;
  int num_outside_ = 0;
};

}  // namespace flashquant::cuda
