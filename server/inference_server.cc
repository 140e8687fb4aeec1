// Builder arguments and the order of start and end.
#include "server/inference_server.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "google/protobuf/stubs/logging.h"
#include "grpc/grpc.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "kernels/base/status_macros.h"
#include "server/admin_service.h"
#include "server/callback_heartbeat.h"
#include "server/delivery_thread.h"
#include "server/inference_service.h"
#include "server/live_calls.h"
#include "server/reflection_service.h"
#include "server/tls_credentials.h"

namespace flashquant {
namespace {

constexpr int kMaxReceiveBytes = 4 << 20;
constexpr int kMaxAdminReceiveBytes = 64 << 10;  // a request id, or a question of reflection
constexpr int kMaxSendBytes = 4 << 20;
constexpr int kMinPingIntervalMs = 20 * 1000;
constexpr int kMaxConnectionIdleMs = 15 * 60 * 1000;
constexpr int kMaxConnectionAgeMs = 30 * 60 * 1000;
constexpr int kHandshakeTimeoutMs = 10 * 1000;

int ToMs(Duration duration) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  return static_cast<int>(std::min<int64_t>(ms, std::numeric_limits<int>::max()));
}

void AddArguments(const InferenceServerOptions& options, grpc::ServerBuilder* builder) {
  // Without this a second server would share the port silently.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, ToMs(options.keepalive));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, ToMs(options.keepalive_timeout));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              kMinPingIntervalMs);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kMaxConnectionIdleMs);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, kMaxConnectionAgeMs);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                              ToMs(options.max_request_duration));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_streams_per_connection);
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
  builder->SetMaxReceiveMessageSize(kMaxReceiveBytes);
  builder->SetMaxSendMessageSize(kMaxSendBytes);
  grpc::ResourceQuota quota("flashquant");
  quota.Resize(static_cast<size_t>(options.memory_quota_bytes));
  builder->SetResourceQuota(quota);
}

}  // namespace

std::string GrpcVersion() { return grpc_version_string(); }

class InferenceServer::Impl {
 public:
  Impl(const InferenceServerOptions& options, Metrics* metrics, const Clock* clock)
      : model_name_(options.model_name),
        metrics_(metrics),
        submitter_(clock, metrics, options.slow_reader),
        delivery_(clock, options.slow_reader),
        environment_{&submitter_, &delivery_, &live_calls_, options.security},
        service_(environment_),
        unknown_methods_(environment_),
        reflection_(environment_, {v1::InferenceService::service_full_name()}),
        admin_(environment_, [this](bool drain) { SetAdminDrain(drain); }),
        admin_reflection_(environment_, {v1::AdminService::service_full_name()}) {}

  absl::Status Start(const InferenceServerOptions& options) {
    grpc::EnableDefaultHealthCheckService(true);
    // It writes a line for every text that is not UTF-8: clients could flood the log.
    google::protobuf::SetLogHandler(nullptr);
    grpc::ServerBuilder builder;
    AddArguments(options, &builder);
    const bool tls = options.security != nullptr && options.security->tls();
    credentials_ =
        tls ? MakeTlsServerCredentials(options.security) : grpc::InsecureServerCredentials();
    builder.AddListeningPort(options.address, credentials_, &port_);
    builder.RegisterService(&service_);
    if (options.reflection) builder.RegisterService(&reflection_);
    builder.RegisterCallbackGenericService(&unknown_methods_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port_ == 0) {
      return ResourceExhaustedError("cannot bind {}: port in use, not allowed, or no such address",
                                    options.address);
    }
    if (!options.admin_address.empty()) FQ_RETURN_IF_ERROR(StartAdmin(options));
    if (metrics_ != nullptr) heartbeat_.emplace(metrics_);
    UpdateHealth();
    return absl::OkStatus();
  }

  absl::Status StartAdmin(const InferenceServerOptions& options) {
    grpc::ServerBuilder builder;
    AddArguments(options, &builder);
    builder.SetMaxReceiveMessageSize(kMaxAdminReceiveBytes);
    builder.AddListeningPort(options.admin_address, credentials_, &admin_port_);
    builder.RegisterService(&admin_);
    if (options.reflection) builder.RegisterService(&admin_reflection_);
    builder.RegisterCallbackGenericService(&admin_unknown_methods_);
    admin_server_ = builder.BuildAndStart();
    if (admin_server_ == nullptr || admin_port_ == 0) {
      return ResourceExhaustedError("cannot bind {}: port in use, not allowed, or no such address",
                                    options.admin_address);
    }
    return absl::OkStatus();
  }

  void SetAdminDrain(bool drain) {
    submitter_.SetAdminDrain(drain);
    UpdateHealth();
  }

  // From the state, so that the last of several that change it at once is right.
  void UpdateHealth() {
    MutexLock lock(&health_mu_);
    const bool serving = submitter_.state() == ServingState::kServing;
    grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
    health->SetServingStatus("", serving);
    health->SetServingStatus(v1::InferenceService::service_full_name(), serving);
    health->SetServingStatus("model/" + model_name_, serving);
  }

  void Shutdown(TimePoint deadline) {
    if (shut_down_) return;
    shut_down_ = true;
    const auto left = std::max(Duration::zero(), deadline - std::chrono::steady_clock::now());
    const auto limit = std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::system_clock::duration>(left);
    if (admin_server_ != nullptr) {
      admin_server_->Shutdown(limit);
      admin_server_->Wait();
    }
    server_->Shutdown(limit);
    server_->Wait();
  }

  const std::string model_name_;
  Metrics* const metrics_;
  CallSubmitter submitter_;
  DeliveryThread delivery_;
  LiveCalls live_calls_;
  const CallEnvironment environment_;
  InferenceService service_;
  UnknownMethods unknown_methods_;
  ReflectionService reflection_;
  AdminService admin_;
  ReflectionService admin_reflection_;
  UnknownMethods admin_unknown_methods_{environment_};
  int admin_port_ = 0;
  int port_ = 0;
  bool shut_down_ = false;
  Mutex health_mu_;  // gRPC's health service wants one caller at a time
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::Server> admin_server_;
  std::optional<CallbackHeartbeat> heartbeat_;
};

InferenceServer::InferenceServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<InferenceServer>> InferenceServer::Start(
    const InferenceServerOptions& options, Metrics* metrics, const Clock* clock) {
  auto impl = std::make_unique<Impl>(options, metrics, clock);
  FQ_RETURN_IF_ERROR(impl->Start(options));
  return std::unique_ptr<InferenceServer>(new InferenceServer(std::move(impl)));
}

InferenceServer::~InferenceServer() { Shutdown(std::chrono::steady_clock::now()); }

int InferenceServer::port() const { return impl_->port_; }

int InferenceServer::admin_port() const { return impl_->admin_port_; }

StreamListener* InferenceServer::listener() { return &impl_->delivery_; }

void InferenceServer::SetServing(std::unique_ptr<const ServingModel> model) {
  impl_->submitter_.SetServing(std::move(model));
  impl_->UpdateHealth();
}

void InferenceServer::SetDraining() {
  impl_->submitter_.SetDraining();
  impl_->UpdateHealth();
}

void InferenceServer::SetFailed() {
  impl_->submitter_.SetFailed();
  impl_->UpdateHealth();
}

void InferenceServer::EndAllCalls() { impl_->delivery_.EndAll(reason::kEngineFailed); }

int64_t InferenceServer::live_calls() { return impl_->live_calls_.count(); }

bool InferenceServer::WaitUntilNoCalls(TimePoint deadline) {
  return impl_->live_calls_.WaitUntilNone(deadline);
}

void InferenceServer::Shutdown(TimePoint deadline) { impl_->Shutdown(deadline); }

}  // namespace flashquant
