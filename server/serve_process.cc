// The port opens before the model is loaded (health answers NOT_SERVING, calls MODEL_LOADING). A
// start that fails says why in one line and ends with a fixed exit code.
#include "server/serve_process.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/base/error_reason.h"
#include "engine/base/exit_code.h"
#include "engine/engine.h"
#include "engine/metrics.h"
#include "engine/model/served_model.h"
#include "kernels/base/status_macros.h"
#include "prometheus/counter.h"
#include "prometheus/registry.h"
#include "server/free_memory.h"
#include "server/inference_server.h"
#include "server/listener_probe.h"
#include "server/logging.h"
#include "server/metrics_endpoint.h"
#include "server/server_config.h"
#include "server/server_security.h"
#include "server/serving_model.h"
#include "server/shutdown.h"
#include "server/watchdog.h"
#include "spdlog/spdlog.h"

namespace flashquant {
namespace {

// Bound of the tokens-per-request buckets: the metrics exist before the model's context is known.
constexpr int32_t kMetricsContext = 131072;
constexpr Duration kAfterDrain = std::chrono::seconds(5);
// How often certificates and tokens are looked at for changes; SIGHUP does it at once.
constexpr Duration kReloadInterval = std::chrono::seconds(30);
constexpr Duration kProbeLimit = std::chrono::seconds(5);

InferenceServerOptions ServerOptions(const ServerConfig& config) {
  InferenceServerOptions options;
  options.address = config.listen_address;
  if (config.admin_address != "off") options.admin_address = config.admin_address;
  options.model_name = ModelName(config);
  options.reflection = config.reflection;
  options.max_streams_per_connection = config.max_streams_per_connection;
  options.keepalive = DurationFromSeconds(config.keepalive_seconds);
  options.keepalive_timeout = DurationFromSeconds(config.keepalive_timeout_seconds);
  options.slow_reader = DurationFromSeconds(config.slow_reader_seconds);
  options.max_request_duration = DurationFromSeconds(config.max_request_seconds);
  return options;
}

ServedModelOptions ModelOptions(const ServerConfig& config) {
  ServedModelOptions options;
  options.path = config.model_path;
  options.backend.kind = config.backend;
  options.backend.num_threads = config.threads;
  options.backend.row_multiple = config.row_multiple;
  options.engine = ToEngineConfig(config);
  options.kv_cache_bytes = config.kv_cache_bytes;
  options.backend.kv_cache_dtype = config.kv_cache_dtype;
  options.gpu_memory_fraction = config.gpu_memory_fraction;
  options.gpu_reserve_bytes = config.gpu_reserve_bytes;
  return options;
}

// One server from start to end. Members are destroyed in reverse order: the engine before the
// server whose delivery thread it feeds, both before the model.
class ServeProcess {
 public:
  explicit ServeProcess(const ServerConfig& config) : config_(config) {}

  // The exit code; says in one line why a start failed.
  int Run() {
    const absl::StatusOr<int> exit_code = RunUntilStopped();
    if (exit_code.ok()) return *exit_code;
    // Before anything is destroyed: the port may be open, and ending a server can hang.
    const int code = ReportStatus(exit_code.status());
    const HardExitTimer hard_exit(kAfterDrain, code);
    engine_.reset();
    CloseServer();
    endpoint_.reset();
    return code;
  }

 private:
  absl::StatusOr<int> RunUntilStopped() {
    FQ_RETURN_IF_ERROR(Listen());
    std::atomic<bool> load_done{false};
    absl::Status load_status;
    std::thread loader([&] {
      load_status = LoadWithoutThrowing();
      load_done.store(true);
      signals_.Notify();
    });
    WaitUntil([&] { return load_done.load() || signals_.stop_signals() > 0; });
    if (!load_done.load()) {
      // Nothing runs yet, and loading cannot be interrupted.
      spdlog::info("stopped while loading");
      DrainServer(server_.get(), nullptr, clock_.Now(), [] { return true; });
      const HardExitTimer now(Duration::zero(), 0);
      loader.join();
      return 0;
    }
    loader.join();
    FQ_RETURN_IF_ERROR(load_status);
    FQ_RETURN_IF_ERROR(Serve());
    WatchSteps();
    memory_check_ = GiveFreeMemoryBack([this] { return server_->live_calls(); });
    WaitUntil([&] { return signals_.stop_signals() > 0 || failed_.load() || deaf_.load(); });
    step_watchdog_.reset();
    return failed_.load() ? EndFailed() : Drain();
  }

  absl::Status Listen() {
    FQ_RETURN_IF_ERROR(RaiseOpenFileLimit());
    LimitFreeMemory();
    InitLogging(config_.log_level, &metrics_);
    InstallCrashHandler(fmt::format("flashquant {}, revision {}", FQ_VERSION, FQ_REVISION),
                        config_.core_files);
    for (const std::string& line : DescribeConfig(config_)) spdlog::info("config: {}", line);
    for (const std::string& warning : config_.warnings) spdlog::warn("config: {}", warning);
    metrics_.SetModelReady(false);
    FQ_ASSIGN_OR_RETURN(security_, ServerSecurity::Load(SecurityPathsOf(config_)));
    for (const std::string& warning : security_->warnings()) spdlog::warn("{}", warning);
    prometheus::Counter& failures = prometheus::BuildCounter()
                                        .Name("flashquant_tls_handshake_failures_total")
                                        .Help("TLS handshakes that failed")
                                        .Register(*registry_)
                                        .Add({});
    // The registry is kept for as long as gRPC may log: to the end of the process.
    if (security_->tls()) WatchHandshakes([&failures, kept = registry_] { failures.Increment(); });
    if (config_.metrics_address != "off") {
      FQ_ASSIGN_OR_RETURN(endpoint_, MetricsEndpoint::Start(config_.metrics_address, registry_));
      spdlog::info("metrics on port {}", endpoint_->port());
    }
    InferenceServerOptions options = ServerOptions(config_);
    options.security = security_.get();
    FQ_ASSIGN_OR_RETURN(server_, InferenceServer::Start(options, &metrics_, &clock_));
    spdlog::info("listening on port {} ({}{}), loading {}", server_->port(),
                 security_->client_certificates() ? "mutual TLS"
                 : security_->tls()               ? "TLS"
                                                  : "plain text",
                 config_.token_file.empty() ? "" : ", tokens", config_.model_path);
    if (server_->admin_port() != 0) spdlog::info("admin service on port {}", server_->admin_port());
    return WatchListener();
  }

  absl::Status WatchListener() {
    const Duration interval = DurationFromSeconds(config_.probe_seconds);
    if (interval <= Duration::zero()) return absl::OkStatus();
    FQ_ASSIGN_OR_RETURN(const HostPort listen,
                        ParseHostPort("listen.address", config_.listen_address));
    const auto answers = [this, interval, host = listen.host] {
      return ListenerAnswers(host, server_->port(), security_->tls(),
                             std::min(kProbeLimit, interval));
    };
    listener_watchdog_ = WatchListenerAnswers(interval, answers, [this] {
      spdlog::error("the listener does not answer its own process: ending for a restart");
      deaf_.store(true);
      signals_.Notify();
    });
    return absl::OkStatus();
  }

  // A step that hangs ends the process: nothing can stop a device that does not return.
  void WatchSteps() {
    if (config_.stuck_step_seconds <= 0) return;
    step_watchdog_ = WatchStepProgress(
        DurationFromSeconds(config_.stuck_step_seconds), [this] { return engine_->progress(); },
        [this] {
          spdlog::error("engine failed: a step takes longer than {} s", config_.stuck_step_seconds);
          DumpState();
          stuck_.store(true);
          failed_.store(true);
          signals_.Notify();
        });
  }

  void ReloadSecurity(bool asked) {
    const TimePoint now = clock_.Now();
    if (!asked && now < next_reload_) return;
    next_reload_ = now + kReloadInterval;
    bool reloaded = asked;
    const absl::Status status = asked ? security_->Reload() : security_->ReloadIfChanged(&reloaded);
    if (!status.ok()) {
      spdlog::warn("reload: {}; the old certificates and tokens stay in use",
                   std::string(status.message()));
    } else if (reloaded) {
      spdlog::info("reload: certificates and tokens read again");
      for (const std::string& warning : security_->warnings()) spdlog::warn("{}", warning);
    }
  }

  absl::Status Load() {
    const TimePoint start = clock_.Now();
    FQ_ASSIGN_OR_RETURN(ServedModel model, LoadServedModel(ModelOptions(config_)));
    model_.emplace(std::move(model));
    metrics_.SetModelLoadDuration(LoadStage::kTotal, ToSeconds(clock_.Now() - start));
    return absl::OkStatus();
  }

  // We do not throw, but the standard library does when memory or threads run out; in a thread of
  // its own that would end the process without a word.
  absl::Status LoadWithoutThrowing() {
    try {
      return Load();
    } catch (const std::bad_alloc&) {
      return ResourceExhaustedError("{}: not enough memory to load the model", config_.model_path);
    } catch (const std::system_error& error) {
      return ResourceExhaustedError("{}: loading the model: {}", config_.model_path, error.what());
    } catch (const std::exception& error) {
      return InternalError("{}: loading the model: {}", config_.model_path, error.what());
    }
  }

  absl::Status Serve() {
    EngineDependencies dependencies;
    dependencies.runner = model_->runner.get();
    dependencies.tokenizer = model_->tokenizer.get();
    dependencies.metrics = &metrics_;
    dependencies.clock = &clock_;
    dependencies.listener = server_->listener();
    dependencies.eos_token_ids = model_->defaults.eos_token_ids;
    dependencies.vocab_size = model_->config.vocab_size;
    dependencies.on_failure = [this](const absl::Status& error) {
      spdlog::error("engine failed: {}", MessageOf(error));
      failed_.store(true);
      signals_.Notify();
    };
    FQ_ASSIGN_OR_RETURN(engine_, Engine::Create(model_->engine, dependencies));
    FQ_ASSIGN_OR_RETURN(auto serving, MakeServingModel(config_, *model_, engine_.get()));
    DescribeModel(*model_, serving->info.revision(), &metrics_);
    const BackendInfo backend = model_->backend->info();
    metrics_.SetBuildInfo(FQ_VERSION, FQ_REVISION, backend.name, FQ_CUDA_VERSION, GrpcVersion());
    spdlog::info("serving model {} on {} ({}), {}, context {}, {} KV blocks of {} tokens in {}",
                 serving->info.model(), backend.name, backend.device, serving->info.quantization(),
                 model_->engine.context_length, model_->engine.num_blocks,
                 model_->engine.block_tokens, DTypeName(backend.kv_dtype));
    LogGpuMemory(*model_);
    if (endpoint_ != nullptr) WatchGpu(*model_, endpoint_.get());
    server_->SetServing(std::move(serving));
    return absl::OkStatus();
  }

  int Drain() {
    const Duration limit = DurationFromSeconds(config_.drain_seconds);
    spdlog::info("stopping: {} calls open, draining for at most {} s", server_->live_calls(),
                 config_.drain_seconds);
    const HardExitTimer hard_exit(limit + kAfterDrain, kExitInternal);
    metrics_.SetModelReady(false);
    const bool ended = DrainServer(server_.get(), engine_.get(), clock_.Now() + limit,
                                   [&] { return signals_.stop_signals() > 1; });
    spdlog::info("stopped: {}", ended ? "all calls ended" : "remaining calls were ended");
    const bool deaf = deaf_.load();
    engine_.reset();
    CloseServer();
    endpoint_.reset();
    return deaf ? kExitSystem : 0;
  }

  void CloseServer() {
    listener_watchdog_.reset();  // both ask the server
    memory_check_.reset();
    server_.reset();
  }

  int EndFailed() {
    const HardExitTimer hard_exit(kAfterDrain, kExitInternal);
    metrics_.SetModelReady(false);
    server_->SetFailed();
    if (stuck_.load()) server_->EndAllCalls();
    server_->WaitUntilNoCalls(clock_.Now() + std::chrono::seconds(2));
    server_->Shutdown(clock_.Now());
    std::optional<HardExitTimer> now;  // waiting for a stuck thread would be waiting for ever
    if (stuck_.load()) now.emplace(Duration::zero(), kExitInternal);
    engine_.reset();
    CloseServer();
    endpoint_.reset();
    return kExitInternal;
  }

  void WaitUntil(const std::function<bool()>& done) {
    signals_.WaitUntil([&] {
      if (signals_.TakeDumpRequest()) DumpState();
      ReloadSecurity(signals_.TakeReloadRequest());
      return done();
    });
  }

  void DumpState() {
    const EngineStats stats = engine_ != nullptr ? engine_->stats() : EngineStats{};
    spdlog::info(
        "state: {} calls open, {} waiting, {} running, {} preempted, {} paused, KV blocks {} of {} "
        "used, {} unaccounted, {} steps",
        server_->live_calls(), stats.requests_waiting, stats.requests_running,
        stats.requests_preempted, stats.requests_paused, stats.kv_blocks_used,
        stats.kv_blocks_total, stats.kv_blocks_unaccounted, stats.steps);
  }

  const ServerConfig& config_;
  SignalWatcher signals_;  // first: every thread inherits its signal mask
  const SteadyClock clock_;
  const std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  Metrics metrics_{*registry_, ModelName(config_), kMetricsContext};
  std::unique_ptr<MetricsEndpoint> endpoint_;
  std::optional<ServedModel> model_;
  std::unique_ptr<ServerSecurity> security_;
  std::unique_ptr<InferenceServer> server_;
  std::unique_ptr<Engine> engine_;
  TimePoint next_reload_ = clock_.Now() + kReloadInterval;
  std::atomic<bool> failed_{false};
  std::atomic<bool> stuck_{false};  // failed, and the engine's thread hangs
  std::atomic<bool> deaf_{false};   // the listener does not answer
  std::unique_ptr<PeriodicCheck> listener_watchdog_;
  std::unique_ptr<PeriodicCheck> step_watchdog_;
  std::unique_ptr<PeriodicCheck> memory_check_;
};

}  // namespace

SecurityPaths SecurityPathsOf(const ServerConfig& config) {
  return {{config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file},
          config.token_file};
}

int ServeUntilStopped(const ServerConfig& config) { return ServeProcess(config).Run(); }

}  // namespace flashquant
