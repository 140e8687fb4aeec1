// Wiring in the order of serve_process.cc.
#include "tests/e2e/model_server.h"

#include <chrono>
#include <filesystem>
#include <utility>

#include "gtest/gtest.h"
#include "server/inference_client.h"
#include "server/serving_model.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using namespace std::chrono_literals;

std::string ModelPath() {
  return std::filesystem::exists("deploy/demo-model/config.json")
             ? "deploy/demo-model"
             : TestDataPath("tiny_models/llama");
}

}  // namespace

ModelServer::ModelServer(const EngineConfig& engine_config, int32_t row_multiple) {
  config_.model_path = ModelPath();
  config_.row_multiple = row_multiple;
  ServedModelOptions options;
  options.path = config_.model_path;
  options.backend.row_multiple = row_multiple;
  options.engine = engine_config;
  auto model = LoadServedModel(options);
  if (!model.ok()) {
    ADD_FAILURE() << model.status();
    return;
  }
  model_.emplace(*std::move(model));
  metrics_.emplace(*registry_, "model", 512);
  auto server = InferenceServer::Start({.model_name = "model"}, &*metrics_, &clock_);
  EXPECT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  EngineDependencies dependencies;
  dependencies.runner = model_->runner.get();
  dependencies.tokenizer = model_->tokenizer.get();
  dependencies.metrics = &*metrics_;
  dependencies.clock = &clock_;
  dependencies.listener = server_->listener();
  dependencies.eos_token_ids = model_->defaults.eos_token_ids;
  dependencies.vocab_size = model_->config.vocab_size;
  auto engine = Engine::Create(model_->engine, dependencies);
  EXPECT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  auto serving = MakeServingModel(config_, *model_, engine_.get());
  EXPECT_TRUE(serving.ok()) << serving.status();
  server_->SetServing(*std::move(serving));
  auto endpoint = MetricsEndpoint::Start("127.0.0.1:0", registry_);
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  endpoint_ = *std::move(endpoint);
}

ModelServer::~ModelServer() {
  if (engine_ != nullptr) engine_->Drain(clock_.Now());
  if (server_ != nullptr) server_->Shutdown(clock_.Now() + 1s);
  engine_.reset();
}

Exposition ModelServer::Scrape() {
  const auto parsed = Exposition::Parse(HttpGet(endpoint_->port(), "/metrics"));
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? *parsed : Exposition();
}

Answer RunOne(const std::string& target, const v1::GenerateRequest& request, int cancel_after) {
  InferenceClient client(target);
  Answer answer;
  answer.result = client.Generate(request, [&](const v1::GenerateResponse& response) {
    answer.Add(response);
    return cancel_after < 0 || static_cast<int>(answer.ids.size()) < cancel_after;
  });
  return answer;
}

}  // namespace flashquant
