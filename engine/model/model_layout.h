// The tensors of a decoder by name and shape: which linear layers there are, and which of them a
// backend packs into one. The loader, the memory plan and the maker of random weights read it here.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/tensor_source.h"
#include "engine/model/model_config.h"

namespace flashquant {

inline constexpr std::string_view kHeadName = "lm_head";
// Of OPT: [max_position + kOptPositionOffset, hidden].
inline constexpr std::string_view kPositionsName = "model.decoder.embed_positions.weight";

// Names are without ".weight" and ".bias".
struct LinearPartShape {
  std::string name;
  int64_t n = 0;
  bool has_bias = false;
};

// Parts that are joined along N.
struct LinearShape {
  std::vector<LinearPartShape> parts;
  int64_t k = 0;

  int64_t n() const;
};

// A norm's weight and bias, each of `size`; the name is without ".weight" and ".bias".
struct NormShape {
  std::string name;
  int64_t size = 0;
  bool has_bias = false;
};

// "model.", or "model.decoder." for OPT: what all names but the head's start with.
std::string_view NamePrefix(DecoderFamily family);

// In the order in which a layer runs them: q, k and v; output; gate and up (OPT: fc1); down (fc2).
inline constexpr size_t kLinearsPerLayer = 4;
std::array<LinearShape, kLinearsPerLayer> LayerLinears(const ModelConfig& config, int32_t layer);

// A layer's two norms: before attention, before the MLP.
std::array<NormShape, 2> LayerNorms(const ModelConfig& config, int32_t layer);
// Those of q and of k, for a model with head_norms.
std::array<NormShape, 2> HeadNorms(const ModelConfig& config, int32_t layer);
NormShape FinalNorm(const ModelConfig& config);

// Where a checkpoint may keep the scales of a layer's keys and values for an FP8 KV cache, a single
// number each; the first of the names that there is counts.
struct KvScaleNames {
  std::array<std::string, 2> k;
  std::array<std::string, 2> v;
};
KvScaleNames KvScalesOf(const ModelConfig& config, int32_t layer);

// The embedding table and the head, which has the same shape.
LinearShape EmbeddingShape(const ModelConfig& config);
LinearShape HeadShape(const ModelConfig& config);
// Whether the checkpoint has a head besides the embedding table: a tied one may be stored on its
// own, as an INT4 layer.
bool HasOwnHead(const TensorSource& tensors, const ModelConfig& config);

}  // namespace flashquant
