// The self-check at the start passes on sound models, and names the layer when the backend computes
// one of them wrongly. The fault is put between the check and the CPU backend.
#include "engine/model/self_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "engine/model/loaded_model.h"
#include "kernels/forwarding_backend.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using ::testing::HasSubstr;
constexpr int32_t kMaxRows = 40;

// As the CPU backend, with one fault.
class FaultyBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

  // The product of this layer gets one wrong feature, from this many rows on.
  const LinearWeight* wrong_layer = nullptr;
  int32_t wrong_from_rows = 1;
  bool wrong_norm = false;
  bool wrong_context = false;

  absl::Status Linear(const LinearParams& params) override {
    const absl::Status status = ForwardingBackend::Linear(params);
    if (!status.ok() || params.weight != wrong_layer || params.num_rows < wrong_from_rows) {
      return status;
    }
    auto* const y = static_cast<float*>(params.y);  // the CPU backend's memory and type
    for (int64_t row = 0; row < params.num_rows; ++row) y[(row + 1) * params.weight->n() - 1] += 99;
    return status;
  }
  absl::Status RmsNorm(const RmsNormParams& params) override {
    RmsNormParams changed = params;
    if (wrong_norm) changed.epsilon = 1.0f;
    return ForwardingBackend::RmsNorm(changed);
  }
  absl::Status PagedAttention(const PagedAttentionParams& params) override {
    PagedAttentionParams changed = params;
    if (wrong_context) changed.sliding_window = 3;
    return ForwardingBackend::PagedAttention(changed);
  }
};

class SelfCheckTest : public testing::Test {
 protected:
  void Load(const std::string& path) {
    // In this order: the model's buffers belong to the backend.
    loaded_.reset();
    auto checkpoint = OpenCheckpoint(path);
    FQ_ASSERT_OK(checkpoint);
    checkpoint_ = *std::move(checkpoint);
    auto loaded = LoadModel(checkpoint_, 64, {.kind = "cpu", .num_threads = 1}, nullptr);
    FQ_ASSERT_OK(loaded);
    loaded_.emplace(*std::move(loaded));
    backend_ = std::make_unique<FaultyBackend>(loaded_->backend.get());
  }
  absl::Status Check() {
    return CheckLayers(checkpoint_, *loaded_->model, kMaxRows, backend_.get());
  }
  const ModelWeights& weights() const { return loaded_->model->weights(); }

  // Expects a refusal that names `layer`.
  void ExpectRefused(const std::string& layer) {
    const absl::Status status = Check();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("self-check: " + layer));
  }

  Checkpoint checkpoint_;
  std::optional<LoadedModel> loaded_;
  std::unique_ptr<FaultyBackend> backend_;
};

TEST_F(SelfCheckTest, PassesOnEverySmallModel) {
  for (const char* name : {"llama", "llama3-rope", "mistral-window", "qwen2", "qwen3", "opt"}) {
    Load(TestDataPath(std::string("tiny_models/") + name));
    FQ_EXPECT_OK(Check());
  }
}

TEST_F(SelfCheckTest, PassesOnAQuantizedModelWithOutliers) {
  Load("deploy/demo-model");
  FQ_EXPECT_OK(Check());
}

TEST_F(SelfCheckTest, NamesTheLinearLayerThatIsWrong) {
  Load("deploy/demo-model");
  backend_->wrong_layer = weights().layers[0].gate_up.get();
  ExpectRefused("model.layers.0.mlp.gate_proj and its like, 1 rows: ");
  backend_->wrong_layer = weights().lm_head();
  ExpectRefused("model.embed_tokens and its like");
}

TEST_F(SelfCheckTest, FindsAFaultOfManyRowsAlone) {
  Load("deploy/demo-model");
  backend_->wrong_layer = weights().layers[0].down.get();
  backend_->wrong_from_rows = 5;
  ExpectRefused("model.layers.0.mlp.down_proj and its like, 40 rows: ");
}

TEST_F(SelfCheckTest, NamesTheOtherOps) {
  Load("deploy/demo-model");
  backend_->wrong_norm = true;
  ExpectRefused("norm: ");
  backend_->wrong_norm = false;
  backend_->wrong_context = true;
  ExpectRefused("attention: ");
}

}  // namespace
}  // namespace flashquant
