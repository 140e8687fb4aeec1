// Certificates and keys are checked before they are used (C6), and replaced only by good ones (L6).
#include "server/tls_files.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/server_security.h"
#include "tests/support/test_certificates.h"

namespace flashquant {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TlsFilesTest : public ::testing::Test {
 protected:
  TlsPaths Write(const CertificateAndKey& pair) {
    return {WriteTestFile("cert.pem", pair.cert), WriteTestFile("key.pem", pair.key), ""};
  }
  absl::Status Refusal(const TlsPaths& paths) { return LoadTlsMaterial(paths).status(); }

  const CertificateAndKey ca_ = MakeCa();
};

TEST_F(TlsFilesTest, GoodFilesAreTakenAsTheyAre) {
  const CertificateAndKey pair = MakeCertificate(ca_);
  TlsPaths paths = Write({pair.cert + ca_.cert, pair.key});  // with its chain
  paths.client_ca = WriteTestFile("ca.pem", ca_.cert);
  const auto material = LoadTlsMaterial(paths);
  ASSERT_TRUE(material.ok()) << material.status();
  EXPECT_EQ(material->cert_chain, pair.cert + ca_.cert);
  EXPECT_EQ(material->key, pair.key);
  EXPECT_EQ(material->client_ca, ca_.cert);
  EXPECT_THAT(material->warnings, IsEmpty());
}

TEST_F(TlsFilesTest, MissingFilesAreNamed) {  // C6
  TlsPaths paths = Write(MakeCertificate(ca_));
  paths.key = "no/such/key.pem";
  EXPECT_EQ(Refusal(paths).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Refusal(paths).message(), "no/such/key.pem: cannot open the file");
}

TEST_F(TlsFilesTest, ExpiredAndFutureCertificatesAreRefused) {  // C6
  const absl::Status expired = Refusal(
      Write(MakeCertificate(ca_, {.valid_from_seconds = -7200, .valid_to_seconds = -3600})));
  EXPECT_EQ(expired.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(expired.message()), EndsWith("cert.pem: the certificate has expired"));
  const absl::Status future = Refusal(Write(MakeCertificate(ca_, {.valid_from_seconds = 3600})));
  EXPECT_THAT(std::string(future.message()), EndsWith("the certificate is not valid yet"));
}

TEST_F(TlsFilesTest, CertificateThatEndsSoonIsAWarning) {
  const auto material =
      LoadTlsMaterial(Write(MakeCertificate(ca_, {.valid_to_seconds = 13 * 86400L})));
  ASSERT_TRUE(material.ok()) << material.status();
  EXPECT_THAT(material->warnings, ElementsAre(HasSubstr("expires within two weeks")));
}

TEST_F(TlsFilesTest, KeyOfAnotherCertificateIsRefused) {  // C6
  const absl::Status status = Refusal(Write({MakeCertificate(ca_).cert, MakeCertificate(ca_).key}));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is not the key of the certificate in"));
}

TEST_F(TlsFilesTest, KeyThatEverybodyCanReadIsAWarning) {  // C6
  const CertificateAndKey pair = MakeCertificate(ca_);
  TlsPaths paths = Write(pair);
  paths.key = WriteTestFile("key.pem", pair.key, 0644);
  const auto material = LoadTlsMaterial(paths);
  ASSERT_TRUE(material.ok()) << material.status();
  EXPECT_THAT(material->warnings, ElementsAre(HasSubstr("can read the key (mode 0644)")));
}

TEST_F(TlsFilesTest, DamagedFilesAreRefused) {
  const CertificateAndKey pair = MakeCertificate(ca_);
  std::string damaged = pair.cert;
  damaged[damaged.size() / 2] = '!';
  EXPECT_FALSE(Refusal(Write({damaged, pair.key})).ok());
  EXPECT_THAT(std::string(Refusal(Write({"", pair.key})).message()),
              EndsWith("no PEM certificate in it"));
  EXPECT_THAT(std::string(Refusal(Write({pair.cert + damaged, pair.key})).message()),
              HasSubstr("cert.pem"));
  EXPECT_THAT(std::string(Refusal(Write({pair.cert, "secret"})).message()),
              HasSubstr("key.pem: no PEM private key"));
  EXPECT_THAT(std::string(Refusal(Write({std::string((1 << 20) + 1, 'x'), pair.key})).message()),
              HasSubstr("too long"));
}

TEST_F(TlsFilesTest, ReloadTakesGoodFilesAndKeepsTheOldOnesOtherwise) {  // L6
  const CertificateAndKey first = MakeCertificate(ca_);
  auto security = ServerSecurity::Load({Write(first), ""});
  ASSERT_TRUE(security.ok()) << security.status();
  uint64_t version = 0;
  EXPECT_EQ((*security)->Tls(&version)->cert_chain, first.cert);
  const uint64_t first_version = version;
  bool reloaded = false;
  EXPECT_TRUE((*security)->ReloadIfChanged(&reloaded).ok());
  EXPECT_FALSE(reloaded);

  WriteTestFile("key.pem", MakeCertificate(ca_).key);  // half of a new pair
  EXPECT_FALSE((*security)->ReloadIfChanged(&reloaded).ok());
  EXPECT_EQ((*security)->Tls(&version)->key, first.key);
  EXPECT_EQ(version, first_version);
  EXPECT_TRUE((*security)->ReloadIfChanged(&reloaded).ok());  // told once

  const CertificateAndKey second = MakeCertificate(ca_);
  Write(second);
  EXPECT_TRUE((*security)->ReloadIfChanged(&reloaded).ok());
  EXPECT_TRUE(reloaded);
  EXPECT_EQ((*security)->Tls(&version)->cert_chain, second.cert);
  EXPECT_GT(version, first_version);
}

TEST_F(TlsFilesTest, TokenFileMustBePrivate) {  // C7
  const std::string text = *TokenLine("a", "x", "");
  for (const unsigned mode : {0644U, 0604U, 0620U, 0602U, 0777U}) {
    const auto file = TokenFile::Load(WriteTestFile("tokens", text, mode));
    EXPECT_EQ(file.status().code(), absl::StatusCode::kFailedPrecondition) << std::oct << mode;
  }
  for (const unsigned mode : {0600U, 0400U, 0440U, 0640U}) {
    EXPECT_TRUE(TokenFile::Load(WriteTestFile("tokens", text, mode)).ok()) << std::oct << mode;
  }
  EXPECT_EQ(TokenFile::Load("no/such/tokens").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(TokenFile::Load(::testing::TempDir()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace flashquant
