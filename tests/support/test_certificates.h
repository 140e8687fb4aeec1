// Certificates for tests, made on the spot with OpenSSL: a CA and what it signs, for any validity.
#pragma once

#include <string>

namespace flashquant {

struct CertificateAndKey {
  std::string cert;  // PEM
  std::string key;   // PEM
};

struct CertificateOptions {
  std::string name = "localhost";   // common name and DNS name; 127.0.0.1 is added
  long valid_from_seconds = -3600;  // from now
  long valid_to_seconds = 365 * 86400L;
};

// Signed by itself.
CertificateAndKey MakeCa(const CertificateOptions& options = {.name = "test CA"});
CertificateAndKey MakeCertificate(const CertificateAndKey& ca,
                                  const CertificateOptions& options = {});

// Writes `text` to a file `name` of the test's own folder with this mode; its path.
std::string WriteTestFile(const std::string& name, const std::string& text, unsigned mode = 0600);

}  // namespace flashquant
