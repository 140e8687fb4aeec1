// OpenSSL reads what gRPC will read.
#include "server/tls_files.h"

#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ctime>
#include <memory>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr size_t kMaxFileBytes = 1 << 20;
constexpr time_t kSoon = 14 * 86400;

template <auto kFree>
struct Free {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using Bio = std::unique_ptr<BIO, Free<BIO_free>>;
using Certificate = std::unique_ptr<X509, Free<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY_free>>;

Bio Reader(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// An encrypted key would ask the terminal otherwise.
int NoPassword(char* /*buffer*/, int /*size*/, int /*writing*/, void* /*data*/) { return -1; }

// The first certificate; every one after it must be readable too.
absl::StatusOr<Certificate> ReadCertificates(const std::string& path, const std::string& pem) {
  const Bio bio = Reader(pem);
  Certificate first(PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr));
  if (first == nullptr) {
    ERR_clear_error();
    return FailedPreconditionError("{}: no PEM certificate in it", path);
  }
  ERR_clear_error();
  while (const Certificate next{PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr)}) {
  }
  // The first error: what is read last, at the end of the file, has no start line either.
  const bool at_end = ERR_GET_REASON(ERR_peek_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (!at_end) return FailedPreconditionError("{}: a certificate in it is damaged", path);
  return first;
}

absl::Status CheckValidNow(const std::string& path, const X509* certificate,
                           std::vector<std::string>* warnings) {
  if (X509_cmp_current_time(X509_get0_notBefore(certificate)) > 0) {
    return FailedPreconditionError("{}: the certificate is not valid yet", path);
  }
  const ASN1_TIME* end = X509_get0_notAfter(certificate);
  if (X509_cmp_current_time(end) < 0) {
    return FailedPreconditionError("{}: the certificate has expired", path);
  }
  time_t soon = std::time(nullptr) + kSoon;
  if (X509_cmp_time(end, &soon) < 0) {
    warnings->push_back(fmt::format("{}: the certificate expires within two weeks", path));
  }
  return absl::OkStatus();
}

void WarnIfOthersCanRead(const std::string& path, std::vector<std::string>* warnings) {
  struct stat info {};
  if (stat(path.c_str(), &info) == 0 && (info.st_mode & S_IRWXO) != 0) {
    warnings->push_back(fmt::format("{}: everybody on this machine can read the key (mode {:04o})",
                                    path, info.st_mode & 07777U));
  }
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  // Without O_NONBLOCK a FIFO would hang the start.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return NotFoundError("{}: cannot open the file", path);
  std::string text(kMaxFileBytes + 1, '\0');
  size_t size = 0;
  ssize_t got = 0;
  while (size < text.size() && (got = read(file, text.data() + size, text.size() - size)) > 0) {
    size += static_cast<size_t>(got);
  }
  close(file);
  if (got < 0) return NotFoundError("{}: cannot read the file", path);
  if (size > kMaxFileBytes) {
    return FailedPreconditionError("{}: too long (limit {} bytes)", path, kMaxFileBytes);
  }
  text.resize(size);
  return text;
}

absl::StatusOr<TlsMaterial> LoadTlsMaterial(const TlsPaths& paths) {
  TlsMaterial material;
  FQ_ASSIGN_OR_RETURN(material.cert_chain, ReadSmallFile(paths.cert));
  FQ_ASSIGN_OR_RETURN(material.key, ReadSmallFile(paths.key));
  FQ_ASSIGN_OR_RETURN(const Certificate certificate,
                      ReadCertificates(paths.cert, material.cert_chain));
  FQ_RETURN_IF_ERROR(CheckValidNow(paths.cert, certificate.get(), &material.warnings));
  const Key key(PEM_read_bio_PrivateKey(Reader(material.key).get(), nullptr, NoPassword, nullptr));
  ERR_clear_error();
  if (key == nullptr) {
    return FailedPreconditionError(
        "{}: no PEM private key in it that can be read without a "
        "password",
        paths.key);
  }
  const bool matches = X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  if (!matches) {
    return FailedPreconditionError("{}: is not the key of the certificate in {}", paths.key,
                                   paths.cert);
  }
  WarnIfOthersCanRead(paths.key, &material.warnings);
  if (!paths.client_ca.empty()) {
    FQ_ASSIGN_OR_RETURN(material.client_ca, ReadSmallFile(paths.client_ca));
    FQ_ASSIGN_OR_RETURN(const Certificate ca,
                        ReadCertificates(paths.client_ca, material.client_ca));
    FQ_RETURN_IF_ERROR(CheckValidNow(paths.client_ca, ca.get(), &material.warnings));
  }
  return material;
}

}  // namespace flashquant
