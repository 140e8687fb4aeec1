// One row's logits before the draw: the best token, penalties, biases and bans, and the logprobs of
// the row as it came in.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/backend/sampling/block.cuh"
#include "kernels/op_params.h"

namespace flashquant::cuda {

// Greater float, greater key; -0 counts as 0.
__device__ inline uint32_t LogitKey(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// What penalties and biases give stays a number.
__device__ inline float KeepFinite(float logit) { return fminf(fmaxf(logit, -FLT_MAX), FLT_MAX); }

// All threads of the block call every function together.
class RowLogits {
 public:
  __device__ RowLogits(float* logits, int vocab_size, SamplingShared& shared)
      : logits_(logits), vocab_size_(vocab_size), shared_(shared) {}

  // The lowest id with the greatest logit; `finite`: whether all are.
  __device__ int32_t Best(bool* finite) { return IdOf(BestRank(~uint64_t{0}, finite)); }

  __device__ void CopyTo(float* other) const {
#pragma unroll 4
    for (int id = threadIdx.x; id < vocab_size_; id += kThreads) other[id] = logits_[id];
    __syncthreads();
  }

  // Penalties and biases, then bans. Whether there were any.
  __device__ bool Change(const SampleTokensParams& params, const SampleRow& row) {
    const bool counts = row.counts_begin < row.counts_end;
    const bool biases = row.biases_begin < row.biases_end;
    __syncthreads();  // all have looked for the best
    if (counts) ApplyPenalties(params.token_counts, row);
    if (biases) ApplyBiases(params.biases, row);
    return Ban(params.banned_ids, row) || counts || biases;
  }

  // Logprobs of `token` and of the row's `num_top` likeliest into out[kLogprobsPerRow]. `best`: as
  // Best gave it.
  __device__ void WriteLogprobs(int32_t token, int32_t best, int num_top, TokenLogprob* out) {
    const float max = logits_[best];
    uint64_t sum = 0;
#pragma unroll 4
    for (int id = threadIdx.x; id < vocab_size_; id += kThreads) {
      sum += __float2ull_rn(expf(logits_[id] - max) * kFixedOne);
    }
    sum = BlockSum(sum, shared_);
    const double log_sum = log(static_cast<double>(sum) / kFixedOne);
    if (threadIdx.x == 0) out[0] = Logprob(token, max, log_sum);
    uint64_t rank = ~uint64_t{0};
    for (int i = 0; i < num_top; ++i) {
      bool finite = true;
      if (rank != 0) rank = BestRank(rank, &finite);
      if (threadIdx.x != 0) continue;
      out[1 + i] = rank == 0 ? TokenLogprob{-1, 0.0f} : Logprob(IdOf(rank), max, log_sum);
    }
  }

 private:
  // Greater for a greater logit, and for a lower id among equal ones; no rank is 0.
  __device__ static uint64_t Rank(float logit, int id) {
    return (static_cast<uint64_t>(LogitKey(logit)) << 32) | ~static_cast<uint32_t>(id);
  }
  __device__ static int32_t IdOf(uint64_t rank) {
    return static_cast<int32_t>(~static_cast<uint32_t>(rank));
  }

  __device__ TokenLogprob Logprob(int32_t id, float max, double log_sum) const {
    const double difference = static_cast<double>(logits_[id]) - static_cast<double>(max);
    return {id, KeepFinite(static_cast<float>(difference - log_sum))};
  }

  // The greatest rank below `below`, 0 when there is none; `finite`: whether all logits are.
  __device__ uint64_t BestRank(uint64_t below, bool* finite) {
    uint64_t best = 0;
    bool bad = false;
    for (int id = threadIdx.x; id < vocab_size_; id += kThreads) {
      const float logit = logits_[id];
      bad = bad || !isfinite(logit);
      const uint64_t rank = Rank(logit, id);
      if (rank < below) best = rank > best ? rank : best;
    }
    *finite = __syncthreads_or(bad ? 1 : 0) == 0;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const uint64_t other = __shfl_xor_sync(kAllLanes, best, offset);
      best = other > best ? other : best;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared_.warps[threadIdx.x / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) {
      const uint64_t other = shared_.warps[warp];
      best = other > best ? other : best;
    }
    return best;
  }

  __device__ bool Has(int32_t id) const { return id >= 0 && id < vocab_size_; }

  // Each id is in the list once, so that no two threads share a logit.
  __device__ void ApplyPenalties(const TokenCount* counts, const SampleRow& row) {
    for (int i = row.counts_begin + static_cast<int>(threadIdx.x); i < row.counts_end;
         i += kThreads) {
      const TokenCount count = counts[i];
      if (!Has(count.token_id)) continue;
      float logit = logits_[count.token_id];
      logit = KeepFinite(logit > 0.0f ? logit / row.repetition_penalty
                                      : logit * row.repetition_penalty);
      if (count.num_outputs > 0) {
        logit = KeepFinite(logit - (static_cast<float>(count.num_outputs) * row.frequency_penalty +
                                    row.presence_penalty));
      }
      logits_[count.token_id] = logit;
    }
    __syncthreads();
  }

  __device__ void ApplyBiases(const TokenBias* biases, const SampleRow& row) {
    for (int i = row.biases_begin + static_cast<int>(threadIdx.x); i < row.biases_end;
         i += kThreads) {
      const TokenBias bias = biases[i];
      if (!Has(bias.token_id)) continue;
      logits_[bias.token_id] = KeepFinite(logits_[bias.token_id] + bias.bias);
    }
    __syncthreads();
  }

  // Whether any id was banned. A ban of every id is no ban: there must be something to draw.
  __device__ bool Ban(const int32_t* banned_ids, const SampleRow& row) {
    const int num_banned = row.banned_end - row.banned_begin;
    if (num_banned <= 0) return false;
    const int32_t* banned = banned_ids + row.banned_begin;
    if (num_banned >= vocab_size_ && BansAll(banned, num_banned)) return false;
    for (int i = threadIdx.x; i < num_banned; i += kThreads) {
      if (Has(banned[i])) logits_[banned[i]] = -INFINITY;
    }
    __syncthreads();
    return true;
  }

  __device__ bool BansAll(const int32_t* banned, int num_banned) const {
    bool all = true;
    for (int id = threadIdx.x; id < vocab_size_ && all; id += kThreads) {
      bool found = false;
      for (int i = 0; i < num_banned && !found; ++i) found = banned[i] == id;
      all = found;
    }
    return __syncthreads_and(all ? 1 : 0) != 0;
  }

  float* const logits_;
  const int vocab_size_;
  SamplingShared& shared_;
};

}  // namespace flashquant::cuda
