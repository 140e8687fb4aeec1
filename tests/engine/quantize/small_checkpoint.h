// A small model folder for the tests of the quantizer, written with the checkpoint writer, and the
// folders that tests work in.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint_writer.h"
#include "gtest/gtest.h"
#include "kernels/base/bfloat16.h"
#include "tests/support/status_matchers.h"

namespace flashquant {

class WorkDir final {
 public:
  WorkDir() {
    std::string pattern = testing::TempDir() + "/fq_quantize_XXXXXX";
    EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  ~WorkDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  WorkDir(const WorkDir&) = delete;
  WorkDir& operator=(const WorkDir&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string FileBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Name to content of every file in a folder.
inline std::map<std::string, std::string> FolderBytes(const std::string& path) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    files[entry.path().filename().string()] = FileBytes(entry.path().string());
  }
  return files;
}

struct SmallLayer {
  std::string name;  // "model.layers.0.mlp.up_proj"
  int64_t n = 0;
  int64_t k = 0;
};

struct SmallModel {
  std::vector<SmallLayer> layers = {{"model.layers.0.mlp.up_proj", 24, 256},
                                    {"model.layers.0.mlp.down_proj", 16, 128}};
  bool tied = true;
  int64_t vocab = 40;
  int64_t hidden = 128;
  float bad_weight = 0;  // put in the middle of the last layer when not 0
};

inline std::vector<uint8_t> RandomBFloat16(int64_t count, uint32_t seed, float bad_weight = 0) {
  std::mt19937 random(seed);
  std::student_t_distribution<float> heavy(4.0f);
  std::vector<uint8_t> bytes(static_cast<size_t>(2 * count));
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    float weight = 0.02f * heavy(random);
    if (bad_weight != 0 && i == static_cast<size_t>(count / 2)) weight = bad_weight;
    const uint16_t bits = ToBFloat16(weight).bits;
    bytes[2 * i] = static_cast<uint8_t>(bits & 0xff);
    bytes[2 * i + 1] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}

inline void WriteSmallModel(const SmallModel& model, const std::string& path) {
  auto writer = CheckpointWriter::Create(path);
  FQ_ASSERT_OK(writer);
  uint32_t seed = 1;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, float bad_weight) {
    int64_t count = 1;
    for (const int64_t dim : shape) count *= dim;
    FQ_ASSERT_OK(
        (*writer)->AddTensor(name, DType::kBF16, shape, RandomBFloat16(count, seed++, bad_weight)));
  };
  add("model.embed_tokens.weight", {model.vocab, model.hidden}, 0);
  add("model.norm.weight", {model.hidden}, 0);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const SmallLayer& layer = model.layers[i];
    const bool last = i + 1 == model.layers.size();
    add(layer.name + ".weight", {layer.n, layer.k}, last ? model.bad_weight : 0);
    add(layer.name + ".bias", {layer.n}, 0);
  }
  if (!model.tied) add("lm_head.weight", {model.vocab, model.hidden}, 0);
  FQ_ASSERT_OK((*writer)->WriteTextFile("tokenizer.json", "{\"a tokenizer\": true}"));
  FQ_ASSERT_OK((*writer)->WriteTextFile("generation_config.json", "{\"eos_token_id\": 3}"));
  FQ_ASSERT_OK((*writer)->WriteTextFile("LICENSE", "terms"));
  FQ_ASSERT_OK((*writer)->WriteTextFile("README.md", "about the original"));
  FQ_ASSERT_OK((*writer)->Finish({{"architectures", {"LlamaForCausalLM"}},
                                  {"hidden_size", model.hidden},
                                  {"tie_word_embeddings", model.tied}}));
}

}  // namespace flashquant
