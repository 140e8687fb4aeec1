// ObservedBackend: a backend that runs a model's forward pass as another one does, but feeds stored
// rows in place of the embedding and shows the inputs of one linear layer. With it the calibration
// uses DecoderModel itself instead of a copy of it.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "kernels/forwarding_backend.h"

namespace flashquant {

class ObservedBackend final : public ForwardingBackend {
 public:
  // `inner` outlives the object and everything made through it.
  explicit ObservedBackend(Backend* inner) : ForwardingBackend(inner) {}

  // Rows [num_tokens, hidden] of the activation type that the next forward passes start from;
  // null: what the embedding gives. row_indices: 0, 1, ... for as many rows as a pass has. All in
  // backend memory.
  void SetEmbeddings(const void* rows, const int32_t* row_indices) {
    embeddings_ = rows;
    row_indices_ = row_indices;
  }
  // Told the inputs [num_rows, k] of `weight`, in backend memory, at each pass. What follows in the
  // pass is left out, up to the next embedding. null: nothing is shown, all is run.
  using Observer = std::function<absl::Status(const void* inputs, int64_t num_rows)>;
  void Observe(const LinearWeight* weight, Observer observer) {
    observed_ = weight;
    observer_ = std::move(observer);
  }
  // Attention's outputs [num_rows, H * D] of the activation type, in backend memory, with stored
  // embeddings: the next passes use these and leave out all that leads to them. null: attention is
  // computed.
  void SetAttention(const void* rows) { attention_ = rows; }

  absl::Status Embedding(const EmbeddingParams& params) override;
  absl::Status RmsNorm(const RmsNormParams& params) override;
  absl::Status LayerNorm(const LayerNormParams& params) override;
  absl::Status HeadNorm(const HeadNormParams& params) override;
  absl::Status AddPositions(const AddPositionsParams& params) override;
  absl::Status Relu(const ReluParams& params) override;
  absl::Status Linear(const LinearParams& params) override;
  absl::Status RopeAndKvWrite(const RopeAndKvWriteParams& params) override;
  absl::Status PagedAttention(const PagedAttentionParams& params) override;
  absl::Status SiluAndMul(const SiluAndMulParams& params) override;
  absl::Status GatherRows(const GatherRowsParams& params) override;
  absl::Status SampleTokens(const SampleTokensParams& params) override;

 private:
  // Rows of backend memory from one place to another.
  absl::Status CopyRows(const void* from, int32_t num_rows, int32_t width, void* to) {
    return inner().GatherRows({.num_rows = num_rows,
                               .hidden = width,
                               .row_indices = row_indices_,
                               .in = from,
                               .out = to});
  }

  const void* embeddings_ = nullptr;
  const int32_t* row_indices_ = nullptr;
  const void* attention_ = nullptr;
  const LinearWeight* observed_ = nullptr;
  Observer observer_;
  // What the op that comes now would give is not needed, or known.
  bool skip() const { return done_ || (attention_ != nullptr && before_attention_); }
  bool done_ = false;              // the observed layer has been seen in this pass
  bool before_attention_ = false;  // of the one layer
};

}  // namespace flashquant
