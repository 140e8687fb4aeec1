// grpc::ServerCredentials over the C interface's certificate fetcher.
#include "server/tls_credentials.h"

#include <string>

#include "grpc/grpc.h"
#include "grpc/grpc_security.h"

namespace flashquant {
namespace {

class TlsServerCredentials final : public grpc::ServerCredentials {
 public:
  explicit TlsServerCredentials(const ServerSecurity* security) : security_(security) {}
  ~TlsServerCredentials() override {
    if (credentials_ != nullptr) grpc_server_credentials_release(credentials_);
  }

  // Tokens are checked by the handlers, which can tell the client why.
  void SetAuthMetadataProcessor(
      const std::shared_ptr<grpc::AuthMetadataProcessor>& /*processor*/) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    if (credentials_ == nullptr) {
      // Made here because gRPC is initialised for certain by now.
      credentials_ = grpc_ssl_server_credentials_create_with_options(
          grpc_ssl_server_credentials_create_options_using_config_fetcher(
              security_->client_certificates()
                  ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                  : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
              Fetch, this));
    }
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  // gRPC calls it under a lock of its own.
  static grpc_ssl_certificate_config_reload_status Fetch(
      void* user_data, grpc_ssl_server_certificate_config** config) {
    auto* self = static_cast<TlsServerCredentials*>(user_data);
    uint64_t version = 0;
    const std::shared_ptr<const TlsMaterial> material = self->security_->Tls(&version);
    if (version == self->fetched_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair = {material->key.c_str(), material->cert_chain.c_str()};
    *config = grpc_ssl_server_certificate_config_create(
        // gRPC insists on some CA here, also when no client is asked for a certificate.
        (material->client_ca.empty() ? material->cert_chain : material->client_ca).c_str(), &pair,
        1);
    if (*config == nullptr) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_FAIL;
    self->fetched_ = version;
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const ServerSecurity* const security_;
  grpc_server_credentials* credentials_ = nullptr;
  uint64_t fetched_ = 0;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MakeTlsServerCredentials(const ServerSecurity* security) {
  return std::make_shared<TlsServerCredentials>(security);
}

}  // namespace flashquant
