// Everything is read into new objects; the pointers are exchanged when all of it is good.
#include "server/server_security.h"

#include <sys/stat.h>

#include <chrono>

#include "kernels/base/status_macros.h"

namespace flashquant {

absl::StatusOr<std::unique_ptr<ServerSecurity>> ServerSecurity::Load(SecurityPaths paths) {
  std::unique_ptr<ServerSecurity> security(new ServerSecurity(std::move(paths)));
  FQ_RETURN_IF_ERROR(security->Reload());
  return security;
}

std::string ServerSecurity::Stamp() const {
  std::string stamp;
  for (const std::string* path :
       {&paths_.tls.cert, &paths_.tls.key, &paths_.tls.client_ca, &paths_.tokens}) {
    struct stat info {};
    if (path->empty() || stat(path->c_str(), &info) != 0) {
      stamp += "-;";
      continue;
    }
    stamp += fmt::format("{}.{}.{}.{}.{};", info.st_dev, info.st_ino, info.st_size,
                         info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
  }
  return stamp;
}

absl::Status ServerSecurity::Reload() {
  // Before the files are read: a change in between is seen again.
  const std::string stamp = Stamp();
  {
    // A bad file is told once, not at every look.
    MutexLock lock(&mu_);
    stamp_ = stamp;
  }
  std::shared_ptr<const TlsMaterial> tls;
  std::shared_ptr<const TokenFile> tokens;
  if (paths_.tls.enabled()) {
    FQ_ASSIGN_OR_RETURN(TlsMaterial material, LoadTlsMaterial(paths_.tls));
    tls = std::make_shared<const TlsMaterial>(std::move(material));
  }
  if (!paths_.tokens.empty()) {
    FQ_ASSIGN_OR_RETURN(TokenFile file, TokenFile::Load(paths_.tokens));
    tokens = std::make_shared<const TokenFile>(std::move(file));
  }
  MutexLock lock(&mu_);
  tls_ = std::move(tls);
  tokens_ = std::move(tokens);
  ++version_;
  return absl::OkStatus();
}

absl::Status ServerSecurity::ReloadIfChanged(bool* reloaded) {
  *reloaded = false;
  const std::string stamp = Stamp();
  {
    MutexLock lock(&mu_);
    if (stamp == stamp_) return absl::OkStatus();
  }
  FQ_RETURN_IF_ERROR(Reload());
  *reloaded = true;
  return absl::OkStatus();
}

std::shared_ptr<const TlsMaterial> ServerSecurity::Tls(uint64_t* version) const {
  MutexLock lock(&mu_);
  *version = version_;
  return tls_;
}

TokenVerdict ServerSecurity::CheckToken(std::span<const std::string_view> headers) const {
  std::shared_ptr<const TokenFile> tokens;
  {
    MutexLock lock(&mu_);
    tokens = tokens_;
  }
  if (tokens == nullptr) return TokenVerdict::kAccepted;
  if (headers.empty()) return TokenVerdict::kMissing;
  if (headers.size() > 1) return TokenVerdict::kMalformed;
  const std::optional<std::string_view> token = BearerToken(headers.front());
  if (!token) return TokenVerdict::kMalformed;
  return tokens->Check(*token, std::chrono::system_clock::now());
}

std::vector<std::string> ServerSecurity::warnings() const {
  MutexLock lock(&mu_);
  return tls_ != nullptr ? tls_->warnings : std::vector<std::string>();
}

}  // namespace flashquant
