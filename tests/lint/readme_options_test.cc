// README's table of `flashquant serve` options must be the one that server/config_options.cc makes.
// To renew it after a change of options: run this test and paste the table that it prints between
// the two markers.
#include <fstream>
#include <sstream>
#include <string>

#include "gtest/gtest.h"
#include "server/server_config.h"

namespace flashquant {
namespace {

TEST(ReadmeOptionsTest, TableOfServeOptionsIsTheOneOfTheProgram) {
  std::ifstream file("README.md");
  std::stringstream text;
  text << file.rdbuf();
  const std::string readme = text.str();
  const std::string begin_marker = "<!-- serve options: begin";
  const size_t begin_line = readme.find(begin_marker);
  const size_t end = readme.find("<!-- serve options: end -->");
  ASSERT_NE(begin_line, std::string::npos);
  ASSERT_NE(end, std::string::npos);
  const size_t begin = readme.find('\n', begin_line) + 1;
  EXPECT_EQ(readme.substr(begin, end - begin), ConfigOptionsMarkdown())
      << "README.md is behind; the table is now:\n"
      << ConfigOptionsMarkdown();
}

}  // namespace
}  // namespace flashquant
