// Server reflection (grpc.reflection.v1alpha), behind the same credentials as every other method:
// the library's plugin answers anybody. Not counted as an open call, so that a tool that stays
// connected does not hold up a drain. An answer repeats its question, so questions are short.
#pragma once

#include <string>
#include <vector>

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/generate_reactor.h"

namespace flashquant {

class ReflectionService final : public grpc::reflection::v1alpha::ServerReflection::
                                    WithRawCallbackMethod_ServerReflectionInfo<
                                        grpc::reflection::v1alpha::ServerReflection::Service> {
 public:
  static constexpr size_t kMaxQuestionBytes = 4096;

  // `services`: full names of what the server offers; its own name is added.
  ReflectionService(const CallEnvironment& environment, std::vector<std::string> services);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServerReflectionInfo(
      grpc::CallbackServerContext* context) override;

 private:
  const CallEnvironment environment_;
  std::vector<std::string> services_;
};

}  // namespace flashquant
