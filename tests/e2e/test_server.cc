// Wiring as in serve_process.cc, with the pretended model.
#include "tests/e2e/test_server.h"

#include <utility>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "prometheus/text_serializer.h"

namespace flashquant {

NumberTokenizer::NumberTokenizer(int repeat) {
  for (int id = 0; id < 1000; ++id) {
    if (id < 256) {
      bytes_.emplace_back(1, static_cast<char>(id));
      continue;
    }
    std::string text;
    for (int i = 0; i < repeat; ++i) text += fmt::format("[{}]", id);
    bytes_.push_back(std::move(text));
  }
}

std::vector<int32_t> NumberTokenizer::Encode(std::string_view text, SpecialText) const {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

void Answer::Add(const v1::GenerateResponse& response) {
  if (response.has_accepted()) {
    in_order = in_order && num_accepted == 0 && num_deltas == 0 && num_finished == 0;
    ++num_accepted;
    accepted = response.accepted();
  } else if (response.has_delta()) {
    in_order = in_order && num_accepted == 1 && num_finished == 0;
    const v1::Delta& delta = response.delta();
    if (delta.token_ids_size() > 0) in_order = in_order && delta.first_index() == ids.size();
    ++num_deltas;
    text += delta.text();
    ids.insert(ids.end(), delta.token_ids().begin(), delta.token_ids().end());
  } else if (response.has_finished()) {
    in_order = in_order && num_accepted == 1 && num_finished == 0;
    ++num_finished;
    finished = response.finished();
  }
}

TestServer::TestServer(TestServerOptions options)
    : options_(std::move(options)),
      tokenizer_(options_.text_repeat),
      runner_(options_.engine.num_blocks, options_.engine.block_tokens, model_),
      metrics_(*registry_, options_.server.model_name, options_.engine.context_length) {
  auto server = InferenceServer::Start(options_.server, &metrics_, &clock_);
  EXPECT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  if (options_.serve) Serve();
}

TestServer::~TestServer() {
  runner_.OpenGate();
  if (engine_ != nullptr) engine_->Drain(clock_.Now());
  server_->Shutdown(clock_.Now() + std::chrono::seconds(1));
  engine_.reset();
  EXPECT_EQ(runner_.violation(), "");
}

void TestServer::Serve() {
  EngineDependencies dependencies;
  dependencies.runner = &runner_;
  dependencies.tokenizer = &tokenizer_;
  dependencies.metrics = &metrics_;
  dependencies.clock = &clock_;
  dependencies.listener = server_->listener();
  dependencies.vocab_size = model_.vocab_size;
  dependencies.on_failure = [this](const absl::Status&) { engine_failed_.store(true); };
  auto engine = Engine::Create(options_.engine, dependencies);
  ASSERT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  MapperOptions mapper;
  mapper.limits.model_name = options_.server.model_name;
  mapper.limits.vocab_size = model_.vocab_size;
  mapper.limits.context_length = options_.engine.context_length;
  mapper.limits.has_tokenizer = true;
  mapper.tokenizer = &tokenizer_;
  mapper.max_request_duration = options_.max_request_duration;
  mapper.random = [next = std::make_shared<std::atomic<uint64_t>>(1000)] { return (*next)++; };
  auto model = std::make_unique<ServingModel>(std::move(mapper), engine_.get());
  model->info.set_model(options_.server.model_name);
  server_->SetServing(std::move(model));
}

std::string TestServer::target() const { return fmt::format("127.0.0.1:{}", server_->port()); }

Answer TestServer::Generate(const v1::GenerateRequest& request, const CallOptions& options) {
  InferenceClient client(target(), options_.client);
  Answer answer;
  answer.result = client.Generate(
      request,
      [&](const v1::GenerateResponse& response) {
        answer.Add(response);
        return true;
      },
      options);
  return answer;
}

std::future<Answer> TestServer::GenerateAsync(const v1::GenerateRequest& request,
                                              const CallOptions& options) {
  return std::async(std::launch::async,
                    [this, request, options] { return Generate(request, options); });
}

Exposition TestServer::Scrape() {
  const auto parsed =
      Exposition::Parse(prometheus::TextSerializer().Serialize(registry_->Collect()));
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? *parsed : Exposition();
}

std::string TestServer::LeakCheck() {
  std::string wrong;
  Eventually(
      [&] {
        const EngineStats stats = engine_->stats();
        const Exposition metrics = Scrape();
        wrong.clear();
        const auto expect_zero = [&](const char* what, double value) {
          if (value != 0) wrong += fmt::format("{} {}; ", what, value);
        };
        expect_zero("open calls", static_cast<double>(server_->live_calls()));
        expect_zero("waiting", static_cast<double>(stats.requests_waiting));
        expect_zero("running", static_cast<double>(stats.requests_running));
        expect_zero("preempted", static_cast<double>(stats.requests_preempted));
        expect_zero("paused", static_cast<double>(stats.requests_paused));
        expect_zero("used KV blocks", static_cast<double>(stats.kv_blocks_used));
        expect_zero("unaccounted KV blocks", static_cast<double>(stats.kv_blocks_unaccounted));
        expect_zero("received - finished", metrics.Sum("flashquant_requests_received_total") -
                                               metrics.Sum("flashquant_requests_finished_total"));
        for (const char* name : {"flashquant_streams_open", "flashquant_stream_pending_messages",
                                 "flashquant_requests_waiting", "flashquant_requests_running",
                                 "flashquant_kv_blocks_unaccounted", "flashquant_kv_usage_ratio"}) {
          expect_zero(name, metrics.Sum(name));
        }
        return wrong.empty();
      },
      std::chrono::seconds(2));
  return wrong;
}

v1::GenerateRequest TextRequest(const std::string& text, uint32_t max_output_tokens,
                                uint64_t seed) {
  v1::GenerateRequest request;
  request.set_text(text);
  request.mutable_sampling()->set_seed(seed);
  request.mutable_stop()->set_max_output_tokens(max_output_tokens);
  request.mutable_output()->set_token_ids(true);
  return request;
}

bool Eventually(const std::function<bool()>& condition, Duration limit) {
  // Nobody notifies: the wait only gives the processor away.
  Mutex mu;
  CondVar never;
  const TimePoint deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    const TimePoint now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    MutexLock lock(&mu);
    never.WaitUntil(&mu, now + std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace flashquant
