// Server reflection (grpc.reflection.v1alpha), behind the same credentials as every other method:
// the library's plugin answers anybody. Not counted as an open call, so that a tool that stays
// connected does not hold up a drain.
#pragma once

#include <string>
#include <vector>

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/generate_reactor.h"

namespace flashquant {

class ReflectionService final
    : public grpc::reflection::v1alpha::ServerReflection::CallbackService {
 public:
  // `services`: full names of what the server offers; its own name is added.
  ReflectionService(const CallEnvironment& environment, std::vector<std::string> services);

  grpc::ServerBidiReactor<grpc::reflection::v1alpha::ServerReflectionRequest,
                          grpc::reflection::v1alpha::ServerReflectionResponse>*
  ServerReflectionInfo(grpc::CallbackServerContext* context) override;

 private:
  const CallEnvironment environment_;
  std::vector<std::string> services_;
};

}  // namespace flashquant
