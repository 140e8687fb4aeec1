// Time of a decode step of Llama-3.1-8B's shapes on the CUDA backend, random weights: INT4 with 1%
// outliers beside BF16, split by stage. Two layers' weights take turns in place of 32 (each is
// larger than the L2 cache); every layer has its own KV cache.
//
//   decode_step_bench [batch ...]      default 1 8 16 32 64
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fmt/format.h"
#include "kernels/backend_factory.h"
#include "tests/support/random_weights.h"

namespace flashquant {
namespace {

constexpr int32_t kHidden = 4096;
constexpr int32_t kHeads = 32;
constexpr int32_t kKvHeads = 8;
constexpr int32_t kHeadDim = 128;
constexpr int32_t kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr int32_t kIntermediate = 14336;
constexpr int32_t kVocab = 128256;
constexpr int32_t kLayers = 32;
constexpr int32_t kWeightSets = 2;
constexpr int32_t kContext = 1024;
constexpr int32_t kMaxBatch = 64;
constexpr int32_t kBlockTokens = 16;
constexpr int kSteps = 20;

void Require(const absl::Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "decode_step_bench: {}\n", std::string(status.message()));
  std::exit(1);
}

template <typename T>
T Require(absl::StatusOr<T> value) {
  Require(value.status());
  return *std::move(value);
}

struct Layer {
  std::unique_ptr<LinearWeight> qkv, output, gate_up, down;
};

class DecodeBench {
 public:
  DecodeBench(Backend* backend, bool int4) : backend_(backend) {
    MakeLayers(int4);
    MakeHead();
    MakeBuffers();
  }

  void Run(int32_t batch) {
    SetBatch(batch);
    const double step = Time([&] { Step(); }, kSteps);
    const double host = host_seconds_;
    const double linears = Time([&] { ForLayers([&](int32_t layer) { Linears(layer); }); }, kSteps);
    const double attention =
        Time([&] { ForLayers([&](int32_t layer) { Attention(layer); }); }, kSteps);
    const double pointwise =
        Time([&] { ForLayers([&](int32_t layer) { Pointwise(layer); }); }, kSteps);
    const double head = Time([&] { Head(); }, kSteps);
    const double sampling = Time([&] { Sample(); }, kSteps);
    fmt::print("{:5} {:9.3f} {:9.1f} {:9.3f} {:9.3f} {:9.3f} {:9.3f} {:9.3f} {:9.3f}\n", batch,
               step * 1e3, batch / step, host * 1e3, linears * 1e3, attention * 1e3,
               pointwise * 1e3, head * 1e3, sampling * 1e3);
  }

  int64_t weight_bytes() const {
    const Layer& layer = layers_[0];
    return kLayers * (layer.qkv->num_bytes() + layer.output->num_bytes() +
                      layer.gate_up->num_bytes() + layer.down->num_bytes());
  }

 private:
  void MakeLayers(bool int4) {
    const std::vector<std::pair<int64_t, int64_t>> shapes = {{kQkv, kHidden},
                                                             {kHidden, kHidden},
                                                             {2 * kIntermediate, kHidden},
                                                             {kHidden, kIntermediate}};
    std::vector<std::unique_ptr<RandomLinear>> linears(kWeightSets * shapes.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < linears.size(); ++i) {
      threads.emplace_back([&, i] {
        RandomLinearOptions options;
        options.n = shapes[i % shapes.size()].first;
        options.k = shapes[i % shapes.size()].second;
        options.int4 = int4;
        options.dense_dtype = DType::kBF16;
        options.density = 0.01;
        options.seed = i + 1;
        linears[i] = std::make_unique<RandomLinear>(options);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t set = 0; set < kWeightSets; ++set) {
      const auto pack = [&](size_t shape) {
        const LinearPart part = linears[set * shapes.size() + shape]->part();
        return Require(backend_->PackLinear({&part, 1}));
      };
      layers_.push_back({pack(0), pack(1), pack(2), pack(3)});
    }
  }

  void MakeHead() {
    RandomLinearOptions options;
    options.n = 256;
    options.k = kHidden;
    options.int4 = false;
    options.dense_dtype = DType::kBF16;
    const RandomLinear rows(options);
    const LinearPart part = rows.part();
    const std::vector<LinearPart> parts(kVocab / 256 + 1, part);
    head_ = Require(backend_->PackLinear(parts));
  }

  void MakeBuffers() {
    const int64_t batch = kMaxBatch;
    const auto acts = [&](int64_t columns) {
      return Require(backend_->Allocate(batch * columns * 2));
    };
    residual_ = acts(kHidden);
    std::vector<BFloat16> hidden;
    for (const float value : RandomFloats(batch * kHidden, 1.0f, 9)) {
      hidden.push_back(ToBFloat16(value));
    }
    hidden_ = Upload(hidden);
    qkv_ = acts(kQkv);
    attention_out_ = acts(kHidden);
    gate_up_ = acts(2 * kIntermediate);
    intermediate_ = acts(kIntermediate);
    logits_ = Require(backend_->Allocate(batch * head_->n() * 4));
    norm_weight_ = Upload(std::vector<float>(kHidden, 1.0f));
    cos_sin_ = Upload(std::vector<float>(static_cast<size_t>(kContext * kHeadDim), 0.7f));
    kv_ = {kLayers, kMaxBatch * kContext / kBlockTokens + 1, kBlockTokens, kKvHeads, kHeadDim};
    for (int32_t layer = 0; layer < 2 * kLayers; ++layer) {
      caches_.push_back(Require(backend_->Allocate(kv_.BlockElements() * kv_.num_blocks * 2)));
    }
    std::vector<int32_t> blocks(static_cast<size_t>(kv_.num_blocks - 1));
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i) + 1;
    block_ids_ = Upload(blocks);
    token_ids_ = Upload(std::vector<int32_t>(kMaxBatch, 1));
    non_finite_ = Require(backend_->Allocate(kMaxBatch));
  }

  template <typename T>
  DeviceBuffer Upload(const std::vector<T>& host) {
    const auto num_bytes = static_cast<int64_t>(host.size() * sizeof(T));
    DeviceBuffer buffer = Require(backend_->Allocate(num_bytes));
    Require(backend_->CopyToDevice(buffer.data(), host.data(), num_bytes));
    return buffer;
  }

  void SetBatch(int32_t batch) {
    batch_ = batch;
    std::vector<int32_t> query_indptr, block_indptr, contexts, positions;
    std::vector<int64_t> slots;
    const std::vector<SampleRow> rows(static_cast<size_t>(batch),
                                      {.temperature = 0.8f, .top_p = 0.95f});
    for (int32_t i = 0; i <= batch; ++i) {
      query_indptr.push_back(i);
      block_indptr.push_back(i * kContext / kBlockTokens);
      contexts.push_back(kContext);
      positions.push_back(kContext - 1);
      slots.push_back((int64_t{i + 1} * kContext / kBlockTokens) * kBlockTokens + kBlockTokens - 1);
    }
    query_indptr_ = Upload(query_indptr);
    block_indptr_ = Upload(block_indptr);
    contexts_ = Upload(contexts);
    positions_ = Upload(positions);
    slots_ = Upload(slots);
    sample_rows_ = Upload(rows);
    host_query_indptr_ = query_indptr;
    host_contexts_ = contexts;
    host_block_indptr_ = block_indptr;
  }

  // Seconds a call, after two warm-up calls; host_seconds_: until the last was queued.
  double Time(const std::function<void()>& body, int calls) {
    using Clock = std::chrono::steady_clock;
    for (int i = 0; i < 2; ++i) body();
    Require(backend_->Synchronize());
    const auto begin = Clock::now();
    for (int i = 0; i < calls; ++i) body();
    host_seconds_ = std::chrono::duration<double>(Clock::now() - begin).count() / calls;
    Require(backend_->Synchronize());
    return std::chrono::duration<double>(Clock::now() - begin).count() / calls;
  }

  static void ForLayers(const std::function<void(int32_t)>& body) {
    for (int32_t layer = 0; layer < kLayers; ++layer) body(layer);
  }

  void Step() {
    AttentionBatch host;
    host.num_sequences = host.num_tokens = batch_;
    host.query_indptr = host_query_indptr_.data();
    host.context_lengths = host_contexts_.data();
    host.block_indptr = host_block_indptr_.data();
    Require(backend_->PlanAttention(host));
    ForLayers([&](int32_t layer) {
      const Layer& weights = layers_[static_cast<size_t>(layer % kWeightSets)];
      Norm();
      Multiply(*weights.qkv, hidden_, qkv_);
      Rope(layer);
      Attend(layer);
      Multiply(*weights.output, attention_out_, hidden_);
      Norm();
      Multiply(*weights.gate_up, hidden_, gate_up_);
      Silu();
      Multiply(*weights.down, intermediate_, hidden_);
    });
    Norm();
    Head();
    Sample();
  }

  void Linears(int32_t layer) {
    const Layer& weights = layers_[static_cast<size_t>(layer % kWeightSets)];
    Multiply(*weights.qkv, hidden_, qkv_);
    Multiply(*weights.output, attention_out_, hidden_);
    Multiply(*weights.gate_up, hidden_, gate_up_);
    Multiply(*weights.down, intermediate_, hidden_);
  }
  void Attention(int32_t layer) {
    Rope(layer);
    Attend(layer);
  }
  void Pointwise(int32_t /*layer*/) {
    Norm();
    Norm();
    Silu();
  }

  void Multiply(const LinearWeight& weight, const DeviceBuffer& x, const DeviceBuffer& y) {
    Require(backend_->Linear({.num_rows = batch_,
                              .weight = &weight,
                              .x = x.data(),
                              .y = y.data(),
                              .y_dtype = DType::kBF16}));
  }
  void Norm() {
    Require(backend_->RmsNorm({.num_rows = batch_,
                               .hidden = kHidden,
                               .x = hidden_.data(),
                               .residual = residual_.data(),
                               .weight = norm_weight_.data(),
                               .out = hidden_.data()}));
  }
  void Silu() {
    Require(backend_->SiluAndMul({.num_rows = batch_,
                                  .intermediate = kIntermediate,
                                  .gate_up = gate_up_.data(),
                                  .out = intermediate_.data()}));
  }
  void Rope(int32_t layer) {
    Require(backend_->RopeAndKvWrite({.num_tokens = batch_,
                                      .num_heads = kHeads,
                                      .num_kv_heads = kKvHeads,
                                      .head_dim = kHeadDim,
                                      .qkv = qkv_.data(),
                                      .positions = positions_.As<int32_t>(),
                                      .slots = slots_.As<int64_t>(),
                                      .cos_sin = cos_sin_.As<float>(),
                                      .kv = kv_,
                                      .k_cache = Cache(layer, 0),
                                      .v_cache = Cache(layer, 1)}));
  }
  void Attend(int32_t layer) {
    PagedAttentionParams params;
    params.batch.num_sequences = params.batch.num_tokens = batch_;
    params.batch.query_indptr = query_indptr_.As<int32_t>();
    params.batch.context_lengths = contexts_.As<int32_t>();
    params.batch.block_indptr = block_indptr_.As<int32_t>();
    params.batch.block_ids = block_ids_.As<int32_t>();
    params.num_heads = kHeads;
    params.num_kv_heads = kKvHeads;
    params.head_dim = kHeadDim;
    params.softmax_scale = 0.088f;
    params.qkv = qkv_.data();
    params.kv = kv_;
    params.k_cache = Cache(layer, 0);
    params.v_cache = Cache(layer, 1);
    params.out = attention_out_.data();
    Require(backend_->PagedAttention(params));
  }
  void* Cache(int32_t layer, int32_t which) const {
    return caches_[static_cast<size_t>(2 * layer + which)].data();
  }
  void Head() {
    Require(backend_->Linear({.num_rows = batch_,
                              .weight = head_.get(),
                              .x = hidden_.data(),
                              .y = logits_.data(),
                              .y_dtype = DType::kF32}));
  }
  void Sample() {
    Require(backend_->SampleTokens({.num_rows = batch_,
                                    .vocab_size = static_cast<int32_t>(head_->n()),
                                    .logits = logits_.As<float>(),
                                    .rows = sample_rows_.As<SampleRow>(),
                                    .token_ids = token_ids_.As<int32_t>(),
                                    .non_finite = non_finite_.As<uint8_t>()}));
  }

  Backend* const backend_;
  int32_t batch_ = 0;
  double host_seconds_ = 0.0;
  std::vector<Layer> layers_;
  std::unique_ptr<LinearWeight> head_;
  PagedKvGeometry kv_;
  std::vector<DeviceBuffer> caches_;
  DeviceBuffer residual_, hidden_, qkv_, attention_out_, gate_up_, intermediate_, logits_;
  DeviceBuffer norm_weight_, cos_sin_, block_ids_, token_ids_, non_finite_, sample_rows_;
  DeviceBuffer query_indptr_, block_indptr_, contexts_, positions_, slots_;
  std::vector<int32_t> host_query_indptr_;
  std::vector<int32_t> host_contexts_;
  std::vector<int32_t> host_block_indptr_;
};

int Main(int argc, char** argv) {
  std::vector<int32_t> batches;
  for (int i = 1; i < argc; ++i) batches.push_back(std::clamp(std::atoi(argv[i]), 1, kMaxBatch));
  if (batches.empty()) batches = {1, 8, 16, 32, 64};
  const auto backend = Require(CreateBackend({.kind = "cuda"}));
  fmt::print("{}, context {}\n", backend->info().device, kContext);
  for (const bool int4 : {true, false}) {
    DecodeBench bench(backend.get(), int4);
    fmt::print("{} layers, {:.2f} GB\n", int4 ? "INT4 + 1% outliers" : "BF16",
               static_cast<double>(bench.weight_bytes()) * 1e-9);
    fmt::print("{:>5} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n", "batch", "step ms",
               "tokens/s", "queue ms", "linears", "attention", "pointwise", "head", "sampling");
    for (const int32_t batch : batches) bench.Run(batch);
  }
  return 0;
}

}  // namespace
}  // namespace flashquant

int main(int argc, char** argv) { return flashquant::Main(argc, argv); }
