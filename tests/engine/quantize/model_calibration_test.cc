// Calibration layer by layer against the whole model: the inputs it reports must be those that the
// ordinary forward pass has, before and after layers are quantized.
#include "engine/quantize/model_calibration.h"

#include <cmath>
#include <memory>

#include "engine/model/loaded_model.h"
#include "engine/model/rope_table.h"
#include "engine/model/text_scorer.h"
#include "engine/quantize/checkpoint_quantizer.h"
#include "engine/quantize/hessian.h"
#include "gtest/gtest.h"
#include "kernels/backend_factory.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/engine/quantize/tiny_llama.h"
#include "tests/support/reference_ops.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

constexpr int32_t kContext = 48;

std::vector<int32_t> SomeTokens(size_t count) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i)
    tokens[i] = static_cast<int32_t>((i * i * 7 + i * 31 + 5) % 512);
  return tokens;
}

ModelCalibrationOptions Options() {
  ModelCalibrationOptions options;
  options.text_path = "tokens";
  options.context = kContext;
  return options;
}

std::vector<float> Weights(const Checkpoint& checkpoint, const std::string& name) {
  const TensorInfo* info = checkpoint.tensors->Find(name);
  std::vector<float> weights(
      static_cast<size_t>(info->shape[0] * (info->shape.size() > 1 ? info->shape[1] : 1)));
  EXPECT_THAT(checkpoint.tensors->ReadRowsAsFloat(*info, 0, info->shape[0], weights.data()),
              IsOk());
  return weights;
}

Hessian Moments(const Calibration::Inputs& inputs) {
  auto moments = inputs.ops->InputMoments();
  EXPECT_THAT(moments, IsOk());
  return Hessian(inputs.ops->num_columns(), *std::move(moments));
}

// Sum of the squared logits of the whole model in `path` over all windows.
double SquaredLogits(const std::string& path, std::span<const int32_t> tokens) {
  const auto loaded = LoadModel(path, kContext, {.kind = "cpu", .num_threads = 1}, nullptr);
  EXPECT_THAT(loaded, IsOk());
  const auto scorer = TextScorer::Create(loaded->model.get(), loaded->backend.get(), kContext);
  EXPECT_THAT(scorer, IsOk());
  double sum = 0;
  for (size_t first = 0; first + kContext <= tokens.size(); first += kContext) {
    EXPECT_THAT((*scorer)->VisitLogits(tokens.subspan(first, kContext),
                                       [&](int32_t, std::span<const float> logits) {
                                         for (const float logit : logits) {
                                           sum += static_cast<double>(logit) *
                                                  static_cast<double>(logit);
                                         }
                                       }),
                IsOk());
  }
  return sum;
}

TEST(ModelCalibrationTest, FirstLayerSeesTheNormalisedEmbeddings) {
  const auto checkpoint = OpenCheckpoint(TestDataPath("tiny_models/llama"));
  FQ_ASSERT_OK(checkpoint);
  const std::vector<int32_t> tokens = SomeTokens(2 * kContext + 17);  // the rest is dropped
  const auto calibration = ModelCalibration::Create(*checkpoint, tokens, Options());
  FQ_ASSERT_OK(calibration);
  EXPECT_EQ((*calibration)->num_tokens(), 2 * kContext);
  const auto inputs = (*calibration)->InputsOf("model.layers.0.self_attn.k_proj");
  FQ_ASSERT_OK(inputs);

  const std::vector<float> table = Weights(*checkpoint, "model.embed_tokens.weight");
  const std::vector<float> norm = Weights(*checkpoint, "model.layers.0.input_layernorm.weight");
  std::vector<float> rows;
  for (size_t i = 0; i < 2 * kContext; ++i) {
    const auto row = table.begin() + tokens[i] * 128;
    rows.insert(rows.end(), row, row + 128);
  }
  std::vector<double> residual;
  const std::vector<double> normed = ReferenceRmsNorm(rows, residual, norm, 2 * kContext, 1e-6);
  const Hessian hessian = Moments(*inputs);
  for (size_t i = 0; i < 128; i += 5) {
    for (size_t j = 0; j < 128; ++j) {
      double sum = 0;
      double magnitude = 0;
      for (size_t row = 0; row < 2 * kContext; ++row) {
        sum += normed[row * 128 + i] * normed[row * 128 + j];
        magnitude += std::fabs(normed[row * 128 + i] * normed[row * 128 + j]);
      }
      EXPECT_NEAR(hessian.at(static_cast<int64_t>(i), static_cast<int64_t>(j)), sum,
                  1e-5 * magnitude);
    }
  }
}

TEST(ModelCalibrationTest, HeadSeesWhatTheWholeModelGivesIt) {
  const std::string path = TestDataPath("tiny_models/llama");
  const auto checkpoint = OpenCheckpoint(path);
  FQ_ASSERT_OK(checkpoint);
  const std::vector<int32_t> tokens = SomeTokens(3 * kContext);
  const auto calibration = ModelCalibration::Create(*checkpoint, tokens, Options());
  FQ_ASSERT_OK(calibration);
  EXPECT_EQ((*calibration)->layers().size(), 2u * 7 + 1);
  const auto inputs = (*calibration)->InputsOf("lm_head");
  FQ_ASSERT_OK(inputs);
  const double squared = SquaredLogits(path, tokens);
  EXPECT_NEAR(Moments(*inputs).Energy(Weights(*checkpoint, "lm_head.weight"), 1), squared,
              1e-4 * squared);
}

// Every input in the middle, against the same observer on the model as a whole.
TEST(ModelCalibrationTest, InnerLayersSeeWhatTheWholeModelGivesThem) {
  const std::string path = TestDataPath("tiny_models/llama");
  const auto checkpoint = OpenCheckpoint(path);
  FQ_ASSERT_OK(checkpoint);
  const std::vector<int32_t> tokens = SomeTokens(2 * kContext);
  const auto calibration = ModelCalibration::Create(*checkpoint, tokens, Options());
  FQ_ASSERT_OK(calibration);

  const auto config = ParseModelConfig(*checkpoint);
  FQ_ASSERT_OK(config);
  const auto backend = CreateBackend({.kind = "cpu", .num_threads = 1});
  FQ_ASSERT_OK(backend);
  ObservedBackend observed(backend->get());
  const auto loaded = LoadModel(path, kContext, {.kind = "cpu", .num_threads = 1}, nullptr);
  FQ_ASSERT_OK(loaded);
  const std::vector<float> rope =
      MakeRopeTable(RopeInverseFrequencies(config->rope, config->head_dim), kContext);
  const auto model = DecoderModel::Load(*checkpoint, *config, rope, &observed, nullptr);
  FQ_ASSERT_OK(model);
  const auto scorer = TextScorer::Create(model->get(), &observed, kContext);
  FQ_ASSERT_OK(scorer);
  int64_t last_id = -1;
  for (const std::string& name : (*calibration)->layers()) {
    if (name == "lm_head") continue;
    const auto inputs = (*calibration)->InputsOf(name);
    FQ_ASSERT_OK(inputs);
    const LayerWeights& weights = (*model)->weights().layers[name.find("layers.1") != name.npos];
    const LinearWeight* weight = name.find("o_proj") != name.npos      ? weights.output.get()
                                 : name.find("down") != name.npos      ? weights.down.get()
                                 : name.find("self_attn") != name.npos ? weights.qkv.get()
                                                                       : weights.gate_up.get();
    Hessian expected(weight->k());
    observed.Observe(weight, [&](const void* rows, int64_t num_rows) {
      expected.Add({static_cast<const float*>(rows), static_cast<size_t>(num_rows * expected.k())},
                   1);
      return absl::OkStatus();
    });
    for (size_t first = 0; first < tokens.size(); first += kContext) {
      FQ_ASSERT_OK((*scorer)->VisitLogits(std::span(tokens).subspan(first, kContext),
                                          [](int32_t, std::span<const float>) {}));
    }
    const Hessian hessian = Moments(*inputs);
    ASSERT_EQ(hessian.k(), expected.k()) << name;
    const double trace_scale = expected.at(0, 0) + expected.at(1, 1);
    for (int64_t i = 0; i < expected.k(); i += 3) {
      for (int64_t j = 0; j < expected.k(); ++j) {
        ASSERT_NEAR(hessian.at(i, j), expected.at(i, j), 1e-4 * trace_scale) << name;
      }
    }
    EXPECT_GE(inputs->id, last_id);
    last_id = inputs->id;
  }
  EXPECT_EQ(last_id, 7);  // four inputs a layer
}

class CalibratedQuantizeTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = TestDataPath("tiny_models/llama");
    auto checkpoint = OpenCheckpoint(path_);
    FQ_ASSERT_OK(checkpoint);
    checkpoint_ = std::make_unique<Checkpoint>(*std::move(checkpoint));
    tokens_ = SomeTokens(8 * kContext);
  }

  absl::StatusOr<QuantizeReport> Quantize(const std::string& output, QuantizeOptions options) {
    ModelCalibrationOptions calibration_options = Options();
    calibration_options.num_threads = options.num_threads;
    auto calibration = ModelCalibration::Create(*checkpoint_, tokens_, calibration_options);
    if (!calibration.ok()) return calibration.status();
    calibration_ = *std::move(calibration);
    return QuantizeCheckpoint(*checkpoint_, output, options, nullptr, calibration_.get());
  }

  const WorkDir dir_;
  std::string path_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<ModelCalibration> calibration_;
  std::vector<int32_t> tokens_;
};

TEST_F(CalibratedQuantizeTest, LaterLayersSeeTheQuantizedOnes) {
  QuantizeOptions options;
  options.method = QuantizeMethod::kGptq;
  options.density = 0;
  FQ_ASSERT_OK(Quantize(dir_ / "out", options));
  const auto inputs = calibration_->InputsOf("lm_head");
  FQ_ASSERT_OK(inputs);
  const double energy = Moments(*inputs).Energy(Weights(*checkpoint_, "lm_head.weight"), 1);
  const double quantized = SquaredLogits(dir_ / "out", tokens_);
  const double original = SquaredLogits(path_, tokens_);
  EXPECT_LT(std::fabs(energy - quantized), 0.1 * std::fabs(energy - original));
}

TEST_F(CalibratedQuantizeTest, OutputErrorFallsFromRoundToNearestToGptqToOutliers) {
  QuantizeOptions options;
  options.density = 0;
  const auto rtn = Quantize(dir_ / "rtn", options);
  FQ_ASSERT_OK(rtn);
  options.method = QuantizeMethod::kGptq;
  const auto gptq = Quantize(dir_ / "gptq", options);
  FQ_ASSERT_OK(gptq);
  options.density = 0.02;
  const auto spqr = Quantize(dir_ / "spqr", options);
  FQ_ASSERT_OK(spqr);
  EXPECT_LT(gptq->Total().relative_output_error(), 0.8 * rtn->Total().relative_output_error());
  EXPECT_LT(spqr->Total().relative_output_error(), 0.8 * gptq->Total().relative_output_error());
  EXPECT_EQ(rtn->method, "rtn");
  EXPECT_EQ(gptq->method, "gptq");
  EXPECT_EQ(spqr->method, "gptq+outliers");
  EXPECT_EQ(spqr->calibration, "384 tokens from number 0 on, windows of 48");
  EXPECT_THAT(ReportTable(*spqr), HasSubstr("out error"));
  const auto out = OpenCheckpoint(dir_ / "spqr");
  FQ_ASSERT_OK(out);
  EXPECT_EQ(out->config["quantization_config"]["method"], "gptq+outliers");
}

TEST_F(CalibratedQuantizeTest, ThresholdDecidesTheDensity) {
  QuantizeOptions options;
  options.method = QuantizeMethod::kGptq;
  options.threshold = 0.05;
  const auto low = Quantize(dir_ / "low", options);
  FQ_ASSERT_OK(low);
  options.threshold = 0.2;
  const auto high = Quantize(dir_ / "high", options);
  FQ_ASSERT_OK(high);
  EXPECT_GT(low->Total().stored_density(), high->Total().stored_density());
  EXPECT_GT(high->Total().stored_density(), 0);
  EXPECT_EQ(high->threshold, 0.2);
}

TEST_F(CalibratedQuantizeTest, OutputIsTheSameForAnyNumberOfThreads) {
  QuantizeOptions options;
  options.method = QuantizeMethod::kGptq;
  options.density = 0.01;
  options.lm_head = TableFormat::kInt4;
  FQ_ASSERT_OK(Quantize(dir_ / "one", options));
  options.num_threads = 5;
  FQ_ASSERT_OK(Quantize(dir_ / "five", options));
  EXPECT_EQ(FolderBytes(dir_ / "one"), FolderBytes(dir_ / "five"));
}

TEST_F(CalibratedQuantizeTest, OneGroupPerRowTakesGptqOutliersAndThresholds) {
  QuantizeOptions options;
  options.group_size = -1;
  options.density = 0;
  const auto rtn = Quantize(dir_ / "rtn", options);
  FQ_ASSERT_OK(rtn);
  options.method = QuantizeMethod::kGptq;
  const auto gptq = Quantize(dir_ / "gptq", options);
  FQ_ASSERT_OK(gptq);
  options.density = 0.02;
  const auto spqr = Quantize(dir_ / "spqr", options);
  FQ_ASSERT_OK(spqr);
  options.num_threads = 3;
  FQ_ASSERT_OK(Quantize(dir_ / "threads", options));
  options.threshold = 0.05;
  const auto threshold = Quantize(dir_ / "threshold", options);
  FQ_ASSERT_OK(threshold);
  EXPECT_LT(gptq->Total().relative_output_error(), 0.9 * rtn->Total().relative_output_error());
  EXPECT_LT(spqr->Total().relative_output_error(), 0.7 * gptq->Total().relative_output_error());
  EXPECT_GT(spqr->Total().stored_density(), 0.018);
  EXPECT_LE(spqr->Total().stored_density(), 0.02);
  EXPECT_GT(threshold->Total().stored_density(), 0);
  EXPECT_EQ(FolderBytes(dir_ / "spqr"), FolderBytes(dir_ / "threads"));
  const auto out = OpenCheckpoint(dir_ / "spqr");
  FQ_ASSERT_OK(out);
  EXPECT_EQ(out->config["quantization_config"]["group_size"], -1);
}

TEST_F(CalibratedQuantizeTest, MethodsThatNeedCalibrationAreRefusedWithoutIt) {
  QuantizeOptions options;
  options.method = QuantizeMethod::kGptq;
  EXPECT_THAT(QuantizeCheckpoint(*checkpoint_, dir_ / "out", options, nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--calibration")));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST(ModelCalibrationErrorTest, TextsThatDoNotFitAreRefused) {
  const auto checkpoint = OpenCheckpoint(TestDataPath("tiny_models/llama"));
  FQ_ASSERT_OK(checkpoint);
  const std::vector<int32_t> tokens = SomeTokens(100);
  ModelCalibrationOptions options = Options();
  options.first_token = 60;
  EXPECT_THAT(ModelCalibration::Create(*checkpoint, tokens, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("40 tokens from number 60")));
  options.first_token = 1000;
  EXPECT_THAT(ModelCalibration::Create(*checkpoint, tokens, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("0 tokens")));
  options = Options();
  options.num_tokens = 40;
  EXPECT_THAT(ModelCalibration::Create(*checkpoint, tokens, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("40 are to be used")));
  options = Options();
  options.context = 257;
  EXPECT_THAT(ModelCalibration::Create(*checkpoint, tokens, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("limit 256")));
  std::vector<int32_t> foreign = tokens;
  foreign[7] = 512;
  EXPECT_THAT(ModelCalibration::Create(*checkpoint, foreign, Options()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("limit 511, got 512")));
}

TEST(ModelCalibrationErrorTest, LayersOutOfOrderAreRefused) {
  const auto checkpoint = OpenCheckpoint(TestDataPath("tiny_models/llama"));
  FQ_ASSERT_OK(checkpoint);
  const auto calibration = ModelCalibration::Create(*checkpoint, SomeTokens(kContext), Options());
  FQ_ASSERT_OK(calibration);
  FQ_ASSERT_OK((*calibration)->InputsOf("model.layers.1.self_attn.q_proj"));
  EXPECT_THAT((*calibration)->InputsOf("model.layers.0.mlp.down_proj"),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("out of order")));
  EXPECT_THAT((*calibration)->InputsOf("model.layers.7.mlp.down_proj"),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("no layer")));
}

}  // namespace
}  // namespace flashquant
