// Many requests at once: every answer equals the request alone, whatever the pool, the chunk size
// and run-ahead do; and every accepted request ends exactly once while threads submit, cancel, stop
// reading and drain.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/metrics.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/mutex.h"
#include "prometheus/registry.h"
#include "tests/support/fake_step_runner.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using std::chrono::seconds;

EngineConfig Config() {
  EngineConfig config;
  config.context_length = 128;
  config.max_sequences = 16;
  config.token_budget = 16;
  config.max_waiting = 1000;
  config.block_tokens = 4;
  config.num_blocks = 1 + 16 * 32;
  return config;
}

struct Job {
  GenerateRequest request;
  std::vector<int32_t> alone;  // the answer of the request by itself
};

std::vector<Job> MakeJobs(int count, uint32_t seed) {
  std::mt19937 random(seed);
  const auto uniform = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const FakeModel model;
  std::vector<Job> jobs;
  for (int i = 0; i < count; ++i) {
    Job job;
    job.request.request_id = fmt::format("job-{}", i);
    const int prompt_tokens = uniform(1, 60);
    for (int t = 0; t < prompt_tokens; ++t) {
      job.request.prompt_tokens.push_back(uniform(0, 999));
    }
    job.request.sampling.seed = static_cast<uint64_t>(uniform(0, 9));
    // The pretended model takes no notice of penalties, but its runner checks their counts.
    if (i % 4 == 1) job.request.sampling.repetition_penalty = 1.1f;
    if (i % 5 == 1) job.request.sampling.frequency_penalty = 0.5f;
    if (i % 3 == 0) job.request.sampling.top_logprobs = i % 4;
    job.request.stop.max_output_tokens = uniform(1, 60);
    job.alone = model.Answer(job.request.prompt_tokens, job.request.sampling.seed,
                             job.request.stop.max_output_tokens);
    if (uniform(0, 3) == 0) {  // a stop token somewhere in the answer
      const auto at = static_cast<size_t>(uniform(0, static_cast<int>(job.alone.size()) - 1));
      job.request.stop.token_ids = {job.alone[at]};
      const auto first = std::find(job.alone.begin(), job.alone.end(), job.alone[at]);
      job.alone.erase(first + 1, job.alone.end());
    }
    jobs.push_back(std::move(job));
  }
  return jobs;
}

struct Variant {
  const char* name;
  int32_t usable_blocks;
  int32_t token_budget;
  int32_t row_multiple;
  bool run_ahead;
};

void ExpectEqual(const OutputLogprobs& got, const OutputLogprobs& expected) {
  EXPECT_EQ(got.chosen.token_id, expected.chosen.token_id);
  EXPECT_EQ(got.chosen.logprob, expected.chosen.logprob);
  ASSERT_EQ(got.top.size(), expected.top.size());
  for (size_t i = 0; i < got.top.size(); ++i) {
    EXPECT_EQ(got.top[i].token_id, expected.top[i].token_id);
    EXPECT_EQ(got.top[i].logprob, expected.top[i].logprob);
  }
}

class EquivalenceTest : public testing::TestWithParam<Variant> {};

// S3
TEST_P(EquivalenceTest, EveryAnswerEqualsTheRequestAlone) {
  const Variant& variant = GetParam();
  EngineConfig config = Config();
  config.num_blocks = variant.usable_blocks + 1;
  config.token_budget = variant.token_budget;
  config.row_multiple = variant.row_multiple;
  config.run_ahead = variant.run_ahead;
  FakeStepRunner runner(config.num_blocks, config.block_tokens);
  EngineDependencies dependencies;
  dependencies.runner = &runner;
  auto engine = Engine::Create(config, dependencies);
  FQ_ASSERT_OK(engine);

  const std::vector<Job> jobs = MakeJobs(120, 42);
  std::vector<std::shared_ptr<RequestStream>> streams;
  for (const Job& job : jobs) {
    auto stream = (*engine)->Submit(job.request);
    FQ_ASSERT_OK(stream);
    streams.push_back(*stream);
  }
  int preemptions = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    std::vector<int32_t> tokens;
    const auto& top_logprobs = jobs[i].request.sampling.top_logprobs;
    while (true) {
      const StreamUpdate update = streams[i]->WaitAndTake();
      tokens.insert(tokens.end(), update.token_ids.begin(), update.token_ids.end());
      ASSERT_EQ(update.logprobs.size(), top_logprobs.has_value() ? update.token_ids.size() : 0u);
      for (size_t t = 0; t < update.logprobs.size(); ++t) {
        ExpectEqual(update.logprobs[t], FakeModel::Logprobs(update.token_ids[t], *top_logprobs));
      }
      if (!update.finished) continue;
      FQ_EXPECT_OK(update.finished->status);
      EXPECT_EQ(update.finished->usage.output_tokens, static_cast<int64_t>(tokens.size()));
      EXPECT_LE(update.finished->usage.preemptions, 8);
      preemptions += update.finished->usage.preemptions;
      break;
    }
    EXPECT_EQ(tokens, jobs[i].alone) << jobs[i].request.request_id;
  }
  EXPECT_TRUE((*engine)->Drain(std::chrono::steady_clock::now() + seconds(60)));
  engine->reset();
  EXPECT_EQ(runner.violation(), "");
  if (variant.usable_blocks < 100) {
    EXPECT_GT(preemptions, 0);
  } else {
    EXPECT_EQ(preemptions, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, EquivalenceTest,
                         testing::Values(Variant{"roomy", 512, 256, 1, false},
                                         Variant{"roomy_run_ahead", 512, 256, 8, true},
                                         Variant{"small_chunks", 512, 16, 1, false},
                                         Variant{"small_chunks_run_ahead", 512, 17, 8, true},
                                         Variant{"tight", 48, 64, 8, false},
                                         Variant{"tight_run_ahead", 48, 64, 1, true},
                                         Variant{"one_at_a_time", 31, 33, 8, true}),
                         [](const auto& instance) { return std::string(instance.param.name); });

// Counts terminal events of each stream, on its own thread, as the delivery thread would.
class Delivery final : public StreamListener {
 public:
  Delivery() : thread_([this] { Run(); }) {}
  ~Delivery() override {
    {
      MutexLock lock(&mu_);
      stop_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }
  void OnStreamReady(const std::shared_ptr<RequestStream>& stream) noexcept override {
    {
      MutexLock lock(&mu_);
      ready_.push_back(stream);
    }
    changed_.NotifyAll();
  }
  std::map<std::string, int> ends() {
    MutexLock lock(&mu_);
    return ends_;
  }

 private:
  void Run() {
    while (true) {
      std::shared_ptr<RequestStream> stream;
      {
        MutexLock lock(&mu_);
        while (ready_.empty() && !stop_) changed_.Wait(&mu_);
        if (ready_.empty()) return;
        stream = ready_.front();
        ready_.pop_front();
      }
      const StreamUpdate update = stream->Take();
      if (!update.finished) continue;
      MutexLock lock(&mu_);
      ++ends_[stream->request_id()];
    }
  }

  Mutex mu_;
  CondVar changed_;
  std::deque<std::shared_ptr<RequestStream>> ready_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int> ends_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// Threads that submit requests, some with a deadline that is over soon, and cancel some of theirs.
class Submitters {
 public:
  static constexpr int kNumThreads = 4;
  static constexpr int kPerThread = 60;

  explicit Submitters(Engine* engine) : engine_(engine) {
    for (int t = 0; t < kNumThreads; ++t) threads_.emplace_back([this, t] { Run(t); });
  }
  ~Submitters() { Join(); }

  void WaitUntilSubmitted(int count) const {
    while (num_submitted_.load() < count) std::this_thread::yield();
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  // Ids of requests that the engine took.
  std::set<std::string> accepted() {
    MutexLock lock(&mu_);
    return accepted_;
  }

 private:
  void Run(int thread) {
    std::mt19937 random(static_cast<uint32_t>(thread));
    std::vector<Job> jobs = MakeJobs(kPerThread, static_cast<uint32_t>(thread));
    std::vector<std::shared_ptr<RequestStream>> mine;
    for (int i = 0; i < kPerThread; ++i) {
      GenerateRequest& request = jobs[static_cast<size_t>(i)].request;
      request.request_id = fmt::format("{}-{}", thread, i);
      if (random() % 10 == 0) {
        request.deadline =
            std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 2000);
      }
      auto stream = engine_->Submit(request);
      num_submitted_.fetch_add(1);
      if (stream.ok()) {
        mine.push_back(*stream);
        MutexLock lock(&mu_);
        accepted_.insert(request.request_id);
      } else {
        std::this_thread::yield();
      }
      if (!mine.empty() && random() % 5 == 0) {
        mine[random() % mine.size()]->Cancel(CancelReason::kClient);
      }
    }
  }

  Engine* const engine_;
  std::atomic<int> num_submitted_{0};
  Mutex mu_;
  std::set<std::string> accepted_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

struct Ending {
  const char* name;
  bool run_ahead;
  int fail_collect;  // 0 = never
  bool drain_at_once;
};

class ConcurrencyTest : public testing::TestWithParam<Ending> {};

void ExpectNothingLeft(const Engine& engine) {
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.kv_blocks_unaccounted, 0);
  EXPECT_EQ(stats.requests_waiting + stats.requests_running + stats.requests_preempted, 0);
}

TEST_P(ConcurrencyTest, EveryAcceptedRequestEndsExactlyOnce) {
  const Ending& ending = GetParam();
  EngineConfig config = Config();
  config.num_blocks = 80;
  config.run_ahead = ending.run_ahead;
  config.max_waiting = 20;
  FakeStepRunner runner(config.num_blocks, config.block_tokens);
  runner.FailCollect(ending.fail_collect);
  prometheus::Registry registry;
  Metrics metrics(registry, "test", config.context_length);
  Delivery delivery;
  EngineDependencies dependencies;
  dependencies.runner = &runner;
  dependencies.listener = &delivery;
  dependencies.metrics = &metrics;
  auto engine = Engine::Create(config, dependencies);
  FQ_ASSERT_OK(engine);

  Submitters submitters(engine->get());
  if (ending.drain_at_once) {
    submitters.WaitUntilSubmitted(Submitters::kPerThread);
    (*engine)->Drain(std::chrono::steady_clock::now());
  }
  submitters.Join();
  (*engine)->Drain(std::chrono::steady_clock::now() + seconds(100));
  if (ending.fail_collect == 0) {
    ExpectNothingLeft(**engine);
  } else {
    EXPECT_EQ((*engine)->health(), EngineHealth::kFailed);
  }
  engine->reset();
  EXPECT_EQ(runner.violation(), "");

  const std::set<std::string> accepted = submitters.accepted();
  EXPECT_GT(accepted.size(), 0u);
  while (delivery.ends().size() < accepted.size()) std::this_thread::yield();
  EXPECT_EQ(delivery.ends().size(), accepted.size());
  for (const auto& [id, count] : delivery.ends()) {
    EXPECT_EQ(count, 1) << id;
    EXPECT_TRUE(accepted.contains(id)) << id;
  }
}

INSTANTIATE_TEST_SUITE_P(Endings, ConcurrencyTest,
                         testing::Values(Ending{"patient_drain", false, 0, false},
                                         Ending{"patient_drain_run_ahead", true, 0, false},
                                         Ending{"hasty_drain", false, 0, true},
                                         Ending{"hasty_drain_run_ahead", true, 0, true},
                                         Ending{"failure", false, 30, false},
                                         Ending{"failure_run_ahead", true, 30, false}),
                         [](const auto& instance) { return std::string(instance.param.name); });

}  // namespace
}  // namespace flashquant
