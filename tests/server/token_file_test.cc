// The file of token hashes: what is accepted, what is refused, and that nothing of it is told.
#include "server/token_file.h"

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

using std::chrono::sys_days;
using std::chrono::year;
using ::testing::HasSubstr;
using ::testing::Not;

// SHA-256 of "abc", from FIPS 180-2.
constexpr char kAbcHash[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
const std::chrono::system_clock::time_point kNow = sys_days(year(2030) / 5 / 17);

std::string ErrorOf(const std::string& text) {
  return std::string(TokenFile::Parse(text, "tokens").status().message());
}

TEST(TokenFileTest, HashIsThatOfTheStandard) {
  const auto file = TokenFile::Parse(std::string("alice ") + kAbcHash, "tokens");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Check("abc", kNow), TokenVerdict::kAccepted);
  for (const char* wrong : {"", "ab", "abcd", "Abc", kAbcHash}) {
    EXPECT_EQ(file->Check(wrong, kNow), TokenVerdict::kUnknown) << wrong;
  }
}

TEST(TokenFileTest, CommentsEmptyLinesAndCarriageReturnsCountAsNothing) {
  const auto file =
      TokenFile::Parse(std::string("# who\r\n\n  \t\na ") + kAbcHash + "\r\n", "tokens");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->size(), 1u);
}

TEST(TokenFileTest, TokenEndsAtTheFirstSecondOfItsDay) {
  const auto file = TokenFile::Parse(std::string("a ") + kAbcHash + " 2030-05-17", "tokens");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Check("abc", kNow - std::chrono::seconds(1)), TokenVerdict::kAccepted);
  EXPECT_EQ(file->Check("abc", kNow), TokenVerdict::kExpired);
}

// Found by fuzzing: such a date is more nanoseconds than a clock's number holds, and a token that
// was to live for ever had expired long ago.
TEST(TokenFileTest, DatesFarFromOursAreCompared) {
  const auto verdict = [](const char* date) {
    const auto file = TokenFile::Parse(fmt::format("a {} {}", kAbcHash, date), "tokens");
    EXPECT_TRUE(file.ok()) << file.status();
    return file->Check("abc", kNow);
  };
  for (const char* date : {"2262-04-12", "2600-01-01", "4052-12-31", "9999-12-31"}) {
    EXPECT_EQ(verdict(date), TokenVerdict::kAccepted) << date;
  }
  for (const char* date : {"1600-01-01", "1000-01-01"}) {
    EXPECT_EQ(verdict(date), TokenVerdict::kExpired) << date;
  }
}

TEST(TokenFileTest, BadLinesAreNamedByNumberNotByContent) {  // C7
  const std::string good = std::string("a ") + kAbcHash + "\n";
  EXPECT_EQ(ErrorOf(""), "tokens: no token in it; make one with: flashquant token NAME");
  EXPECT_EQ(ErrorOf(good + "b secret-in-clear\n"),
            "tokens:2: hash: must be the 64 hex digits of a SHA-256");
  EXPECT_EQ(ErrorOf("# x\n\nsecret/name " + std::string(kAbcHash)),
            "tokens:3: name: must be 1 to 64 of letters, digits, '.', '_', '-'");
  EXPECT_EQ(ErrorOf(good + "a " + std::string(64, '0')), "tokens:2: name: given twice");
  EXPECT_EQ(ErrorOf(good + "b " + kAbcHash), "tokens:2: hash: given twice");
  EXPECT_EQ(ErrorOf("a " + std::string(kAbcHash) + " 2030-02-30"),
            "tokens:1: expires: must be a date, YYYY-MM-DD");
  EXPECT_EQ(ErrorOf("a " + std::string(kAbcHash) + " 2030-02-20 x"),
            "tokens:1: more than three fields");
  for (const char* bad : {"b secret", "b g", "secret"}) {
    EXPECT_THAT(ErrorOf(bad), Not(HasSubstr("secret"))) << bad;
  }
  EXPECT_THAT(ErrorOf("a " + std::string(63, '0') + "g"), HasSubstr("hash:"));
  EXPECT_THAT(ErrorOf("a -" + std::string(63, '0')), HasSubstr("hash:"));
  EXPECT_THAT(ErrorOf(std::string(TokenFile::kMaxFileBytes + 1, '#')), HasSubstr("too long"));
}

TEST(TokenFileTest, HeaderHasOneSchemeAndOneVisibleToken) {
  EXPECT_EQ(BearerToken("Bearer abc"), "abc");
  EXPECT_EQ(BearerToken("bEARER abc"), "abc");
  for (const char* bad : {"", "Bearer", "Bearer ", "Basic abc", "Bearer a b", "Bearer  abc",
                          "Bearerabc", "abc", "Bearer a\tb", "Bearer \xC3\xA9"}) {
    EXPECT_EQ(BearerToken(bad), std::nullopt) << bad;
  }
  EXPECT_NE(BearerToken("Bearer " + std::string(4096, 'x')), std::nullopt);
  EXPECT_EQ(BearerToken("Bearer " + std::string(4097, 'x')), std::nullopt);
}

TEST(TokenFileTest, MadeTokensDifferAndTheirLinesLetThemIn) {
  const absl::StatusOr<std::string> token = RandomToken();
  const absl::StatusOr<std::string> other = RandomToken();
  ASSERT_TRUE(token.ok() && other.ok());
  EXPECT_NE(*token, *other);
  EXPECT_EQ(token->size(), 46u);
  const auto line = TokenLine("bob", *token, "2031-01-01");
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_THAT(*line, Not(HasSubstr(*token)));
  const auto file = TokenFile::Parse(*line, "tokens");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Check(*token, kNow), TokenVerdict::kAccepted);
  EXPECT_EQ(file->Check(*other, kNow), TokenVerdict::kUnknown);
  EXPECT_FALSE(TokenLine("b ob", *token, "").ok());
  EXPECT_FALSE(TokenLine("bob", *token, "tomorrow").ok());
}

}  // namespace
}  // namespace flashquant
