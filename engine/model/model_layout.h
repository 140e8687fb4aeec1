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

inline constexpr std::string_view kEmbeddingName = "model.embed_tokens";
inline constexpr std::string_view kHeadName = "lm_head";
inline constexpr std::string_view kFinalNormName = "model.norm.weight";

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

// In the order in which a layer runs them: q, k and v; output; gate and up; down.
inline constexpr size_t kLinearsPerLayer = 4;
std::array<LinearShape, kLinearsPerLayer> LayerLinears(const ModelConfig& config, int32_t layer);

// Full names of a layer's two norms: before attention, before the MLP.
std::array<std::string, 2> LayerNorms(int32_t layer);

// The embedding table and the head, which has the same shape.
LinearShape EmbeddingShape(const ModelConfig& config);
LinearShape HeadShape(const ModelConfig& config);
// Whether the checkpoint has a head besides the embedding table: a tied one may be stored on its
// own, as an INT4 layer.
bool HasOwnHead(const TensorSource& tensors, const ModelConfig& config);

}  // namespace flashquant
