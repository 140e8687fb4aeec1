// Answers come from the descriptors that are linked into the program.
#include "server/reflection_service.h"

#include <set>
#include <utility>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"

namespace flashquant {
namespace {

using grpc::reflection::v1alpha::ServerReflection;
using grpc::reflection::v1alpha::ServerReflectionRequest;
using grpc::reflection::v1alpha::ServerReflectionResponse;
using Services = std::vector<std::string>;

// The file and everything it imports, each once.
void AddFile(const google::protobuf::FileDescriptor& file, std::set<std::string>* seen,
             ServerReflectionResponse* response) {
  if (!seen->insert(file.name()).second) return;
  google::protobuf::FileDescriptorProto proto;
  file.CopyTo(&proto);
  response->mutable_file_descriptor_response()->add_file_descriptor_proto(
      proto.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) AddFile(*file.dependency(i), seen, response);
}

void Answer(const Services& services, const ServerReflectionRequest& request,
            ServerReflectionResponse* response) {
  response->set_valid_host(request.host());
  *response->mutable_original_request() = request;
  const auto* pool = google::protobuf::DescriptorPool::generated_pool();
  const google::protobuf::FileDescriptor* file = nullptr;
  switch (request.message_request_case()) {
    case ServerReflectionRequest::kListServices:
      for (const std::string& name : services) {
        response->mutable_list_services_response()->add_service()->set_name(name);
      }
      return;
    case ServerReflectionRequest::kFileByFilename:
      file = pool->FindFileByName(request.file_by_filename());
      break;
    case ServerReflectionRequest::kFileContainingSymbol:
      file = pool->FindFileContainingSymbol(request.file_containing_symbol());
      break;
    default:  // extensions: proto3 services have none
      break;
  }
  if (file == nullptr) {
    response->mutable_error_response()->set_error_code(
        static_cast<int>(grpc::StatusCode::NOT_FOUND));
    response->mutable_error_response()->set_error_message("not found");
    return;
  }
  std::set<std::string> seen;
  AddFile(*file, &seen, response);
}

// One question at a time: read, answer, read.
class Reactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Reactor(const Services& services) : services_(services) { StartRead(&request_); }
  explicit Reactor(const Services& services, const grpc::Status& refusal) : services_(services) {
    Finish(refusal);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::OK);
      return;
    }
    ServerReflectionRequest request;
    if (request_.Length() > ReflectionService::kMaxQuestionBytes ||
        !ParseMessage(request_, &request)) {
      Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                          "question: cannot be parsed, or over 4096 bytes"));
      return;
    }
    ServerReflectionResponse response;
    Answer(services_, request, &response);
    response_ = SerializeMessage(response);
    StartWrite(&response_);
  }
  void OnWriteDone(bool ok) override {
    if (ok) {
      StartRead(&request_);
    } else {
      Finish(grpc::Status::CANCELLED);
    }
  }
  void OnDone() override { delete this; }

 private:
  ~Reactor() override = default;

  const Services& services_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
};

}  // namespace

ReflectionService::ReflectionService(const CallEnvironment& environment, Services services)
    : environment_(environment), services_(std::move(services)) {
  services_.emplace_back(ServerReflection::service_full_name());
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>*
ReflectionService::ServerReflectionInfo(grpc::CallbackServerContext* context) {
  if (const auto error = CheckCredentials(environment_, *context)) {
    return new Reactor(services_, FinishStatus(*error, context));
  }
  return new Reactor(services_);
}

}  // namespace flashquant
