#include "server/local_target.h"

#include "kernels/base/status_macros.h"
#include "server/tls_files.h"

namespace flashquant {

absl::StatusOr<LocalTarget> FindLocalTarget(const ConfigSources& sources,
                                            const ClientFlags& flags) {
  ConfigSources asked = sources;
  asked.flags["model.path"] = "any";  // required to serve, not to ask
  FQ_ASSIGN_OR_RETURN(const ServerConfig config, LoadServerConfig(asked));
  FQ_ASSIGN_OR_RETURN(HostPort listen, ParseHostPort("listen.address", config.listen_address));
  if (listen.host == "0.0.0.0") listen.host = "127.0.0.1";
  if (listen.host == "::") listen.host = "::1";
  LocalTarget local;
  const bool v6 = listen.host.find(':') != std::string::npos;
  local.target = fmt::format("{}{}{}:{}", v6 ? "[" : "", listen.host, v6 ? "]" : "", listen.port);
  FQ_ASSIGN_OR_RETURN(local.security, LoadClientSecurity(flags));
  if (config.tls_cert_file.empty()) {
    local.security = ClientSecurity();
    return local;
  }
  local.security.tls = true;
  local.security.check_server = false;
  local.security.token.clear();
  if (!config.tls_client_ca_file.empty() && local.security.cert_pem.empty()) {
    FQ_ASSIGN_OR_RETURN(local.security.cert_pem, ReadSmallFile(config.tls_cert_file));
    FQ_ASSIGN_OR_RETURN(local.security.key_pem, ReadSmallFile(config.tls_key_file));
  }
  return local;
}

}  // namespace flashquant
