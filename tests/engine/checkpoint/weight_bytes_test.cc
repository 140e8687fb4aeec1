// Bytes of a checkpoint by what its tensors hold, from their names and sizes alone.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/checkpoint/quantized_tensors.h"

namespace flashquant {
namespace {

// Names and sizes; nothing may be read.
class NamedTensors final : public TensorSource {
 public:
  void Add(const std::string& name, int64_t num_bytes) {
    infos_.push_back({name, DType::kU8, {num_bytes}, num_bytes});
  }
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  absl::Status ReadRows(const TensorInfo& tensor, int64_t /*first_row*/, int64_t /*num_rows*/,
                        void* /*out*/) const override {
    return absl::InternalError("read: " + tensor.name);
  }

 private:
  std::vector<TensorInfo> infos_;
};

TEST(WeightBytesTest, EveryTensorCountsOnceByWhatItHolds) {
  NamedTensors tensors;
  tensors.Add("model.layers.0.mlp.up_proj.qweight", 1);
  tensors.Add("model.layers.1.mlp.up_proj.qweight", 2);
  tensors.Add("model.layers.0.mlp.up_proj.scales", 10);
  tensors.Add("model.layers.0.mlp.up_proj.zeros", 20);
  tensors.Add("model.embed_tokens.weight_scale", 40);
  tensors.Add("model.layers.0.mlp.up_proj.outlier_tile_indptr", 100);
  tensors.Add("model.layers.0.mlp.up_proj.outlier_bucket_info", 200);
  tensors.Add("model.layers.0.mlp.up_proj.outlier_groups", 400);
  tensors.Add("model.embed_tokens.weight", 1000);
  tensors.Add("model.norm.weight", 2000);
  tensors.Add("model.layers.0.self_attn.q_proj.bias", 4000);
  const WeightBytes bytes = CountWeightBytes(tensors);
  EXPECT_EQ(bytes.codes, 3);
  EXPECT_EQ(bytes.scales, 70);
  EXPECT_EQ(bytes.outliers, 700);
  EXPECT_EQ(bytes.dense, 7000);
}

}  // namespace
}  // namespace flashquant
