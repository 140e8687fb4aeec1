// Certificates, keys and CAs from PEM files, checked before gRPC gets them: gRPC alone would say
// nothing about a key that does not match, and fail every handshake.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace flashquant {

struct TlsPaths {
  std::string cert;       // the server's chain, its own certificate first; empty = no TLS
  std::string key;        // its private key, not encrypted
  std::string client_ca;  // CAs of the clients; empty = clients need no certificate
  bool enabled() const { return !cert.empty(); }
};

struct TlsMaterial {
  std::string cert_chain;
  std::string key;
  std::string client_ca;
  std::vector<std::string> warnings;  // a key that others may read, an end within two weeks
};

// NOT_FOUND for a missing file; FAILED_PRECONDITION, naming the file, for one that is no PEM, over
// 1 MiB, a certificate that is not valid now, a key of another certificate. Never quotes a file.
absl::StatusOr<TlsMaterial> LoadTlsMaterial(const TlsPaths& paths);

// A whole text file of at most 1 MiB.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

}  // namespace flashquant
