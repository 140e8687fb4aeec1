// ServerSecurity: who may call: TLS certificates and bearer tokens in use, and their reload without
// a restart. No gRPC here; tls_credentials.h and generate_reactor.h ask it.
//
// New files are checked first; what is wrong keeps the old ones in use.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"
#include "server/tls_files.h"
#include "server/token_file.h"

namespace flashquant {

struct SecurityPaths {
  TlsPaths tls;
  std::string tokens;  // empty = no tokens are asked for
};

// Any thread.
class ServerSecurity final {
 public:
  // The errors of LoadTlsMaterial and TokenFile::Load.
  static absl::StatusOr<std::unique_ptr<ServerSecurity>> Load(SecurityPaths paths);

  // Reads all files again. The error names the file; everything stays as it was then.
  absl::Status Reload();
  // The same, if a file has changed since it was last read (time, size or identity).
  absl::Status ReloadIfChanged(bool* reloaded);

  bool tls() const { return paths_.tls.enabled(); }
  bool client_certificates() const { return !paths_.tls.client_ca.empty(); }
  // The material in use and its number, which grows with each reload. Only with tls().
  std::shared_ptr<const TlsMaterial> Tls(uint64_t* version) const;

  // `headers`: all values of "authorization". Accepts everything when no tokens are asked for.
  TokenVerdict CheckToken(std::span<const std::string_view> headers) const;

  // Of the files in use.
  std::vector<std::string> warnings() const;

 private:
  explicit ServerSecurity(SecurityPaths paths) : paths_(std::move(paths)) {}
  std::string Stamp() const;

  const SecurityPaths paths_;
  mutable Mutex mu_;
  std::string stamp_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<const TlsMaterial> tls_ ABSL_GUARDED_BY(mu_);
  uint64_t version_ ABSL_GUARDED_BY(mu_) = 0;
  std::shared_ptr<const TokenFile> tokens_ ABSL_GUARDED_BY(mu_);
};

}  // namespace flashquant
