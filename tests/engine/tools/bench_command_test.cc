// flashquant bench kernel through its command line, on a machine without a GPU: what it prints and
// writes, and which exit code it gives.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "engine/base/exit_code.h"
#include "engine/tools/commands.h"
#include "engine/tools/run_tool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/bench/kernel_bench.h"

namespace flashquant {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class BenchCommandTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) /
           (std::string("fq_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  // Runs `bench kernel` with `flags`; exit code, output and errors go to the members.
  void Run(const std::vector<std::string>& flags) {
    CLI::App app;
    AddBenchCommand(app, &exit_code_);
    std::vector<std::string> arguments{"bench", "kernel"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them last first
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    try {
      app.parse(arguments);
    } catch (const CLI::ParseError&) {
      exit_code_ = kExitUsage;
    }
    std::fflush(stdout);
    out_ = testing::internal::GetCapturedStdout();
    err_ = testing::internal::GetCapturedStderr();
  }

  std::string File(const std::string& name) const { return (dir_ / name).string(); }
  static std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  fs::path dir_;
  int exit_code_ = -1;
  std::string out_;
  std::string err_;
};

TEST_F(BenchCommandTest, WithoutAGpuItSaysSoAndIsUnavailable) {
  std::string device;
  std::string error;
  if (bench::DescribeBenchDevice(&device, &error)) GTEST_SKIP() << "there is a GPU";
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{}, {"--figure", "7"}, {"--figure", "11"}}) {
    Run(flags);
    EXPECT_EQ(exit_code_, kExitUnavailable);
    EXPECT_EQ(err_, "flashquant: " + error + "\n") << "nothing else, of other libraries";
  }
}

TEST_F(BenchCommandTest, FiguresThatNeedNoGpuArePrintedWrittenAndDrawn) {
  for (const std::string figure : {"9", "10", "12"}) {
    Run({"--figure", figure, "--shapes", "256x128", "--density", "0.01,0.03", "--csv",
         File("figure.csv"), "--plot", File("figure.svg")});
    EXPECT_EQ(exit_code_, 0) << err_;
    EXPECT_THAT(out_, HasSubstr("Figure " + figure));
    const std::string csv = Read(File("figure.csv"));
    EXPECT_TRUE(csv.starts_with("figure,x,series,value\n"));
    EXPECT_THAT(csv, HasSubstr("Figure " + figure));
    EXPECT_THAT(Read(File("figure.svg")), HasSubstr("<polyline"));
  }
}

TEST_F(BenchCommandTest, ShapesMayComeFromAFile) {
  std::ofstream(File("shapes.txt")) << "# K x N\n 256 x 64\n\n128x256 # joined\n";
  Run({"--figure", "9", "--shapes", File("shapes.txt"), "--density", "0.01"});
  EXPECT_EQ(exit_code_, 0) << err_;
  EXPECT_THAT(out_, HasSubstr("256x64 1%"));
  EXPECT_THAT(out_, HasSubstr("128x256 1%"));
  std::ofstream(File("shapes.txt")) << "256x64\n256\n";
  Run({"--figure", "9", "--shapes", File("shapes.txt")});
  EXPECT_EQ(exit_code_, kExitUsage);
  EXPECT_THAT(err_, HasSubstr("line 2"));
}

TEST_F(BenchCommandTest, ExitCodesTellWhatWasWrong) {
  for (const std::string& no_shape :
       {File("missing"), std::string("4294967304x8"), std::string("8x8x")}) {
    Run({"--shapes", no_shape});
    EXPECT_EQ(exit_code_, kExitNoInput) << no_shape;
  }
  const std::vector<std::vector<std::string>> wrong = {{"--shapes", "100x64"},
                                                       {"--shapes", "0x64"},
                                                       {"--shapes", "262144x262144"},
                                                       {"--m", "0"},
                                                       {"--m", "129"},
                                                       {"--density", "0.6"},
                                                       {"--density", "nan"},
                                                       {"--figure", "6"},
                                                       {"--plot", File("x.svg")},
                                                       {"--path", "teleport"},
                                                       {"--figure", "12", "--m", "8,16"},
                                                       {"--figure", "9", "--smem", "99"},
                                                       {"--figure", "10", "--path", "sm80"},
                                                       {"--figure", "11", "--path", "bulk"},
                                                       {"--figure", "12", "--smem", "99"}};
  for (const std::vector<std::string>& flags : wrong) {
    Run(flags);
    EXPECT_EQ(exit_code_, kExitUsage) << flags[0] << " " << flags[1];
  }
}

TEST(RunToolTest, ResourcesThatRunOutAreSystemErrors) {
  EXPECT_EQ(RunTool([] { return absl::OkStatus(); }), 0);
  EXPECT_EQ(RunTool([] { return absl::NotFoundError("file"); }), kExitNoInput);
  EXPECT_EQ(RunTool([]() -> absl::Status { throw std::bad_alloc(); }), kExitSystem);
  EXPECT_EQ(RunTool([]() -> absl::Status {
              throw std::system_error(EAGAIN, std::generic_category(), "thread");
            }),
            kExitSystem);
}

TEST(RunToolTest, OutputThatCannotBeWrittenIsAnError) {
  std::fflush(stdout);
  const int own = dup(STDOUT_FILENO);
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(own, 0);
  ASSERT_GE(full, 0);
  dup2(full, STDOUT_FILENO);
  std::vector<int> exit_codes;
  for (const size_t length : {size_t{1}, size_t{1} << 20}) {  // still buffered; failed before
    exit_codes.push_back(RunTool([&] {
      std::fputs(std::string(length, 'x').c_str(), stdout);
      return absl::OkStatus();
    }));
  }
  dup2(own, STDOUT_FILENO);
  close(full);
  close(own);
  EXPECT_EQ(exit_codes, std::vector<int>(2, kExitSystem));
}

TEST_F(BenchCommandTest, FilesThatCannotBeWrittenAreRefusedBeforeTheWork) {
  for (const std::string flag : {"--csv", "--plot"}) {
    Run({"--figure", "12", flag, File("no/such/folder.csv")});
    EXPECT_EQ(exit_code_, kExitNoInput);
    EXPECT_EQ(out_, "") << "nothing is measured before";
    Run({"--figure", "12", flag, dir_.string()});
    EXPECT_EQ(exit_code_, kExitBadData);
    EXPECT_THAT(err_, HasSubstr(dir_.string()));
    Run({"--figure", "12", flag, "/dev/full"});
    EXPECT_EQ(exit_code_, kExitSystem) << err_;
  }
  std::ofstream(File("kept.csv")) << "kept";
  Run({"--figure", "12", "--shapes", "8x8,8x8", "--csv", File("kept.csv"), "--plot", File("no")});
  EXPECT_EQ(exit_code_, kExitUsage);
  EXPECT_EQ(Read(File("kept.csv")), "kept");
  EXPECT_FALSE(fs::exists(File("no")));
}

}  // namespace
}  // namespace flashquant
