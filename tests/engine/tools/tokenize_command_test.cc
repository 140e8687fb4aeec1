// flashquant tokenize through its command line: what it prints and which exit code it gives.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "engine/base/exit_code.h"
#include "engine/tools/commands.h"
#include "gtest/gtest.h"
#include "tests/engine/tokenizer/tiny_tokenizer.h"

namespace flashquant {
namespace {

namespace fs = std::filesystem;

class TokenizeCommandTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(::testing::TempDir()) /
           ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::create_directories(dir_);
    std::ofstream(dir_ / "tokenizer.json") << TinyTokenizerJson({{"t", "h"}}, {"<s>"}).dump();
    std::ofstream(dir_ / "tokenizer_config.json") << R"({"bos_token": "<s>"})";
    std::ofstream(dir_ / "text.txt", std::ios::binary) << "th<s>\n\na";
  }
  void TearDown() override { fs::remove_all(dir_); }

  // What the command prints to stdout; its exit code goes to exit_code_.
  std::string Run(const std::vector<std::string>& flags) {
    CLI::App app;
    AddTokenizeCommand(app, &exit_code_);
    std::vector<std::string> arguments{"tokenize", "--model", dir_.string(), "--file",
                                       (dir_ / "text.txt").string()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them last first
    ::testing::internal::CaptureStdout();
    app.parse(arguments);
    return ::testing::internal::GetCapturedStdout();
  }

  fs::path dir_;
  int exit_code_ = -1;
};

TEST_F(TokenizeCommandTest, JsonIsOneArrayWithoutSpecialTokensAdded) {
  EXPECT_EQ(Run({"--json"}), "[256,257,10,10,97]\n");
  EXPECT_EQ(exit_code_, 0);
}

TEST_F(TokenizeCommandTest, LinesGiveOneArrayEachWithoutTheLineFeed) {
  EXPECT_EQ(Run({"--json", "--lines"}), "[256,257]\n[]\n[97]\n");
}

TEST_F(TokenizeCommandTest, PlainDoesNotRecogniseAddedTokens) {
  EXPECT_EQ(Run({"--json", "--plain"}), "[256,60,115,62,10,10,97]\n");
}

TEST_F(TokenizeCommandTest, BosComesFirst) {
  EXPECT_EQ(Run({"--json", "--bos"}), "[257,256,257,10,10,97]\n");
}

TEST_F(TokenizeCommandTest, WithoutJsonEachTokenHasALine) {
  EXPECT_EQ(Run({}), "256\t\"th\"\n257\t\"<s>\"\n10\t\"\\n\"\n10\t\"\\n\"\n97\t\"a\"\n");
}

TEST_F(TokenizeCommandTest, MissingFilesAndBrokenTokenizersHaveTheirExitCodes) {
  fs::remove(dir_ / "text.txt");
  Run({"--json"});
  EXPECT_EQ(exit_code_, kExitNoInput);
  std::ofstream(dir_ / "tokenizer.json") << "{";
  Run({"--json"});
  EXPECT_EQ(exit_code_, kExitBadData);
  fs::remove(dir_ / "tokenizer.json");
  Run({"--json"});
  EXPECT_EQ(exit_code_, kExitNoInput);
}

TEST_F(TokenizeCommandTest, BosThatTheTokenizerDoesNotNameIsAnError) {
  fs::remove(dir_ / "tokenizer_config.json");
  EXPECT_EQ(Run({"--json", "--bos"}), "");
  EXPECT_EQ(exit_code_, kExitBadData);
}

}  // namespace
}  // namespace flashquant
