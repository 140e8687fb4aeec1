// P-256 keys: made in a millisecond.
#include "tests/support/test_certificates.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

template <typename Write>
std::string ToPem(Write write) {
  BIO* bio = BIO_new(BIO_s_mem());
  write(bio);
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(bio, &bytes);
  std::string pem(bytes, static_cast<size_t>(size));
  BIO_free(bio);
  return pem;
}

void AddExtension(X509* certificate, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, certificate, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  ASSERT_NE(extension, nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

CertificateAndKey Make(const CertificateAndKey* ca, const CertificateOptions& options) {
  static int64_t serial = 1;
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = X509_new();
  X509_set_version(certificate, 2);
  ASN1_INTEGER_set_int64(X509_get_serialNumber(certificate), serial++);
  X509_gmtime_adj(X509_getm_notBefore(certificate), options.valid_from_seconds);
  X509_gmtime_adj(X509_getm_notAfter(certificate), options.valid_to_seconds);
  X509_set_pubkey(certificate, key);
  X509_NAME* name = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(options.name.c_str()), -1, -1,
                             0);
  EVP_PKEY* signer = key;
  if (ca == nullptr) {
    X509_set_issuer_name(certificate, name);
    AddExtension(certificate, NID_basic_constraints, "critical,CA:TRUE");
  } else {
    BIO* bio = BIO_new_mem_buf(ca->cert.data(), static_cast<int>(ca->cert.size()));
    X509* issuer = PEM_read_bio_X509(bio, nullptr, nullptr, nullptr);
    X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
    X509_free(issuer);
    BIO_free(bio);
    bio = BIO_new_mem_buf(ca->key.data(), static_cast<int>(ca->key.size()));
    signer = PEM_read_bio_PrivateKey(bio, nullptr, nullptr, nullptr);
    BIO_free(bio);
    AddExtension(certificate, NID_subject_alt_name, "DNS:" + options.name + ",IP:127.0.0.1");
  }
  EXPECT_GT(X509_sign(certificate, signer, EVP_sha256()), 0);
  CertificateAndKey made;
  made.cert = ToPem([&](BIO* bio) { PEM_write_bio_X509(bio, certificate); });
  made.key = ToPem(
      [&](BIO* bio) { PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr); });
  if (signer != key) EVP_PKEY_free(signer);
  EVP_PKEY_free(key);
  X509_free(certificate);
  return made;
}

}  // namespace

CertificateAndKey MakeCa(const CertificateOptions& options) { return Make(nullptr, options); }

CertificateAndKey MakeCertificate(const CertificateAndKey& ca, const CertificateOptions& options) {
  return Make(&ca, options);
}

std::string WriteTestFile(const std::string& name, const std::string& text, unsigned mode) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) /
                                       ("fq_" + std::to_string(getpid())) / test->name();
  std::filesystem::create_directories(folder);
  const std::string path = folder / name;
  // A new file: a server must never see half of it.
  const std::string draft = path + ".new";
  std::ofstream(draft) << text;
  chmod(draft.c_str(), mode);
  std::filesystem::rename(draft, path);
  return path;
}

}  // namespace flashquant
