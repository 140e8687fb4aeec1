// AdminService: the operator's calls on one server: its numbers, its open requests, drain, prefix
// cache. Asks for the same credentials as every other service.
#pragma once

#include <functional>

#include "flashquant/v1/admin_service.grpc.pb.h"
#include "server/generate_reactor.h"

namespace flashquant {

class AdminService final : public v1::AdminService::CallbackService {
 public:
  // `set_drain` turns admission off and on, health with it.
  AdminService(const CallEnvironment& environment, std::function<void(bool)> set_drain);

  grpc::ServerUnaryReactor* GetEngineStats(grpc::CallbackServerContext* context,
                                           const v1::GetEngineStatsRequest* request,
                                           v1::GetEngineStatsResponse* response) override;
  grpc::ServerUnaryReactor* ListRequests(grpc::CallbackServerContext* context,
                                         const v1::ListRequestsRequest* request,
                                         v1::ListRequestsResponse* response) override;
  grpc::ServerUnaryReactor* CancelRequest(grpc::CallbackServerContext* context,
                                          const v1::CancelRequestRequest* request,
                                          v1::CancelRequestResponse* response) override;
  grpc::ServerUnaryReactor* SetDrain(grpc::CallbackServerContext* context,
                                     const v1::SetDrainRequest* request,
                                     v1::SetDrainResponse* response) override;
  grpc::ServerUnaryReactor* ResetPrefixCache(grpc::CallbackServerContext* context,
                                             const v1::ResetPrefixCacheRequest* request,
                                             v1::ResetPrefixCacheResponse* response) override;

 private:
  v1::ServingState State() const;

  const CallEnvironment environment_;
  const std::function<void(bool)> set_drain_;
};

}  // namespace flashquant
