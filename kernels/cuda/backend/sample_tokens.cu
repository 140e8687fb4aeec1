// Sampling: temperature, top-k, top-p, min-p, and one seeded draw per row; one block a row.
//
// Nothing is sorted. Every question is of one form: which key (a logit as an ordered integer) is
// the largest with at least `target` of some measure at or above it? With the measure 1 that is the
// k-th best, with the weight it is top-p's cut, and with a random target it is the draw itself. It
// is answered three bits of the key at a time. Weights are 64-bit fixed point, so that sums do not
// depend on their order. Ids of equal logits come lowest first, as on the CPU.
#include <cstdint>

#include "kernels/cuda/backend/op_launchers.h"

namespace flashquant::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 8;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kFixedOne = 0x1p40f;  // the weight of the best token

struct Shared {
  uint64_t warp_bins[kWarps][kBins];
  uint64_t bins[kBins];
  int32_t id;
};

// Greater float, greater key; -0 counts as 0.
__device__ uint32_t ToKey(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ float FromKey(uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}

// Which tokens may be drawn: all with a greater key, and the `ties` lowest ids with this one.
struct Cut {
  uint32_t key = 0;
  uint64_t ties = 0;
};

struct CountMeasure {
  __device__ uint64_t operator()(float /*logit*/) const { return 1; }
};

// The weight exp((logit - max) / temperature) in fixed point; 0 below min_p.
struct WeightMeasure {
  float max = 0.0f;
  float inverse_temperature = 1.0f;
  float min_p = 0.0f;
  __device__ uint64_t operator()(float logit) const {
    const float weight = expf((logit - max) * inverse_temperature);
    return weight < min_p ? 0 : __float2ull_rn(weight * kFixedOne);
  }
};

// 1 for logits of one key.
struct KeyMeasure {
  uint32_t key = 0;
  __device__ uint64_t operator()(float logit) const { return ToKey(logit) == key ? 1 : 0; }
};

__device__ uint64_t WarpSum(uint64_t value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Adds up each bin over the block, into shared.bins for all threads.
__device__ void SumBins(const uint64_t (&bins)[kBins], Shared& shared) {
  const int warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int bin = 0; bin < kBins; ++bin) {
    const uint64_t sum = WarpSum(bins[bin]);
    if (threadIdx.x % 32 == 0) shared.warp_bins[warp][bin] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kBins) {
    uint64_t sum = 0;
    for (int other = 0; other < kWarps; ++other) sum += shared.warp_bins[other][threadIdx.x];
    shared.bins[threadIdx.x] = sum;
  }
  __syncthreads();
}

// The block's view of one row.
class RowSampler {
 public:
  __device__ RowSampler(const SampleRow& row, float* logits, int vocab_size, Shared& shared)
      : row_(row), logits_(logits), vocab_size_(vocab_size), shared_(shared) {}

  __device__ bool AllFinite() const {
    bool bad = false;
    for (int id = threadIdx.x; id < vocab_size_; id += kThreads)
      bad = bad || !isfinite(logits_[id]);
    return __syncthreads_or(bad ? 1 : 0) == 0;
  }

  __device__ int32_t Sample(const int32_t* banned_ids) {
    Ban(banned_ids);
    const int32_t best = Best();
    // Written so that NaN is greedy too.
    if (!(row_.temperature >= kGreedyTemperature)) return best;
    weight_.max = logits_[best];
    weight_.inverse_temperature = 1.0f / row_.temperature;
    const bool top_k = row_.top_k > 0 && row_.top_k < vocab_size_;
    const bool top_p = row_.top_p < 1.0f;
    if (top_k) CutToTopK();
    if (top_p) CutToTopP();
    weight_.min_p = row_.min_p;
    const uint64_t total = Total(weight_);
    if (total == 0) return best;  // min_p above 1
    const uint64_t target = DrawTarget(total);
    if (!top_k && !top_p) return FindInIdOrder(weight_, target);
    const Cut drawn = Search(weight_, target);
    return FindInIdOrder(KeyMeasure{drawn.key}, drawn.ties);
  }

 private:
  // A ban of every id is no ban: there must be something to draw.
  __device__ void Ban(const int32_t* banned_ids) {
    const int num_banned = row_.banned_end - row_.banned_begin;
    if (num_banned <= 0) return;
    const int32_t* banned = banned_ids + row_.banned_begin;
    if (num_banned >= vocab_size_ && BansAll(banned, num_banned)) return;
    __syncthreads();
    for (int i = threadIdx.x; i < num_banned; i += kThreads) {
      const int32_t id = banned[i];
      if (id >= 0 && id < vocab_size_) logits_[id] = -INFINITY;
    }
    __syncthreads();
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

  // The lowest id with the greatest logit.
  __device__ int32_t Best() {
    uint64_t best = 0;
    for (int id = threadIdx.x; id < vocab_size_; id += kThreads) {
      const uint64_t rank =
          (static_cast<uint64_t>(ToKey(logits_[id])) << 32) | ~static_cast<uint32_t>(id);
      best = rank > best ? rank : best;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const uint64_t other = __shfl_xor_sync(kAllLanes, best, offset);
      best = other > best ? other : best;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared_.warp_bins[threadIdx.x / 32][0] = best;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) {
      const uint64_t other = shared_.warp_bins[warp][0];
      best = other > best ? other : best;
    }
    return static_cast<int32_t>(~static_cast<uint32_t>(best));
  }

  __device__ void CutToTopK() { cut_ = Search(CountMeasure{}, static_cast<uint64_t>(row_.top_k)); }

  // The fewest best tokens that hold top_p of what is left.
  __device__ void CutToTopP() {
    const uint64_t total = Total(weight_);
    const double wanted = ceil(static_cast<double>(row_.top_p) * static_cast<double>(total));
    uint64_t target = wanted > 1.0 ? static_cast<uint64_t>(wanted) : 1;
    target = target < total ? target : total;
    cut_ = Search(weight_, target);
  }

  // The measure of all tokens that may be drawn.
  template <typename Measure>
  __device__ uint64_t Total(const Measure& measure) {
    uint64_t bins[kBins] = {};
    for (int id = threadIdx.x; id < vocab_size_; id += kThreads) {
      const float logit = logits_[id];
      if (ToKey(logit) > cut_.key) bins[0] += measure(logit);
    }
    if (threadIdx.x == 0 && cut_.ties > 0) bins[0] += cut_.ties * measure(FromKey(cut_.key));
    SumBins(bins, shared_);
    return shared_.bins[0];
  }

  // The key that the best tokens reach `target` of the measure with, and how many of its ids that
  // takes. 1 <= target <= Total(measure).
  template <typename Measure>
  __device__ Cut Search(const Measure& measure, uint64_t target) {
    uint32_t base = 0;
    uint64_t above = 0;  // of keys that are too great
    for (int shift = 30; shift >= 0; shift -= 3) {
      uint64_t bins[kBins] = {};
      for (int id = threadIdx.x; id < vocab_size_; id += kThreads) {
        const float logit = logits_[id];
        const uint32_t key = ToKey(logit);
        if (key > cut_.key) AddToBin(measure, logit, key, base, shift, bins);
      }
      SumBins(bins, shared_);
      uint32_t bin = kBins;
      do {
        --bin;
        const uint64_t sum = shared_.bins[bin] + TiesInBin(measure, base, shift, bin);
        if (bin == 0 || above + sum >= target) break;
        above += sum;
      } while (true);
      base += bin << shift;
    }
    const uint64_t each = measure(FromKey(base));
    return {base, (target - above + each - 1) / each};
  }

  template <typename Measure>
  __device__ static void AddToBin(const Measure& measure, float logit, uint32_t key, uint32_t base,
                                  int shift, uint64_t (&bins)[kBins]) {
    const uint32_t bin = (key - base) >> shift;
    if (key < base || bin >= kBins) return;
    const uint64_t value = measure(logit);
#pragma unroll
    for (uint32_t i = 0; i < kBins; ++i) bins[i] += i == bin ? value : 0;
  }

  template <typename Measure>
  __device__ uint64_t TiesInBin(const Measure& measure, uint32_t base, int shift,
                                uint32_t bin) const {
    if (cut_.ties == 0 || cut_.key < base || (cut_.key - base) >> shift != bin) return 0;
    return cut_.ties * measure(FromKey(cut_.key));
  }

  // The first id at which the running sum of the measure in id order reaches `target`.
  template <typename Measure>
  __device__ int32_t FindInIdOrder(const Measure& measure, uint64_t target) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int per_warp = (vocab_size_ + kThreads - 1) / kThreads * 32;
    uint64_t sum = 0;
    for (int i = lane; i < per_warp; i += 32) sum += MeasureAt(measure, warp * per_warp + i);
    sum = WarpSum(sum);
    __syncthreads();
    if (lane == 0) shared_.warp_bins[warp][0] = sum;
    __syncthreads();
    uint64_t before = 0;
    int holder = 0;
    while (holder < kWarps - 1 && before + shared_.warp_bins[holder][0] < target) {
      before += shared_.warp_bins[holder++][0];
    }
    if (warp == holder) FindInSegment(measure, warp * per_warp, per_warp, target - before);
    __syncthreads();
    return shared_.id;
  }

  template <typename Measure>
  __device__ uint64_t MeasureAt(const Measure& measure, int id) const {
    return id < vocab_size_ ? measure(logits_[id]) : 0;
  }

  // One warp: the same over [begin, begin + length), length a multiple of 32.
  template <typename Measure>
  __device__ void FindInSegment(const Measure& measure, int begin, int length, uint64_t target) {
    const int lane = threadIdx.x % 32;
    for (int first = begin; first < begin + length; first += 32) {
      uint64_t sum = MeasureAt(measure, first + lane);
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint64_t left = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += left;
      }
      const unsigned reached = __ballot_sync(kAllLanes, sum >= target);
      if (reached != 0) {
        if (lane == 0) shared_.id = first + __ffs(static_cast<int>(reached)) - 1;
        return;
      }
      target -= __shfl_sync(kAllLanes, sum, 31);
    }
  }

  // 1 to total, from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")
  // of (seed, output position), as on the CPU.
  __device__ uint64_t DrawTarget(uint64_t total) const {
    const auto position = static_cast<uint64_t>(row_.output_position);
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                           0, 0};
    uint32_t key[2] = {static_cast<uint32_t>(row_.seed), static_cast<uint32_t>(row_.seed >> 32)};
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
      const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
      const uint32_t next[4] = {
          static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
      for (int i = 0; i < 4; ++i) counter[i] = next[i];
      key[0] += 0x9E3779B9u;
      key[1] += 0xBB67AE85u;
    }
    const uint64_t bits = (static_cast<uint64_t>(counter[0]) << 32) | counter[1];
    const double uniform = static_cast<double>(bits >> 11) * 0x1p-53;
    const auto below = static_cast<uint64_t>(uniform * static_cast<double>(total));
    return below < total ? below + 1 : total;
  }

  const SampleRow& row_;
  float* const logits_;
  const int vocab_size_;
  Shared& shared_;
  WeightMeasure weight_;
  Cut cut_;
};

__global__ void __launch_bounds__(kThreads) SampleTokensKernel(SampleTokensParams params) {
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  const SampleRow sample_row = params.rows[row];
  RowSampler sampler(sample_row, params.logits + row * params.vocab_size, params.vocab_size,
                     shared);
  const bool finite = sampler.AllFinite();
  const int32_t token = finite ? sampler.Sample(params.banned_ids) : 0;
  if (threadIdx.x != 0) return;
  params.token_ids[row] = token;
  params.non_finite[row] = finite ? 0 : 1;
}

}  // namespace

cudaError_t LaunchSampleTokens(const SampleTokensParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  SampleTokensKernel<<<static_cast<unsigned>(params.num_rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flashquant::cuda
