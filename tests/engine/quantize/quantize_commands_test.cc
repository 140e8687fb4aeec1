// flashquant quantize and flashquant inspect through their command lines: exit codes, what they
// print and what they leave behind.
#include <fstream>
#include <string>
#include <vector>

#include "engine/tools/commands.h"
#include "gtest/gtest.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

struct CommandResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

CommandResult RunCommand(std::vector<std::string> arguments) {
  CLI::App app;
  CommandResult result;
  AddQuantizeCommand(app, &result.exit_code);
  AddInspectCommand(app, &result.exit_code);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes a vector
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    result.exit_code = 64;
    result.err = error.what();
  }
  std::fflush(stdout);
  result.out = testing::internal::GetCapturedStdout();
  result.err += testing::internal::GetCapturedStderr();
  return result;
}

TEST(QuantizeCommandTest, PrintsATableAndWritesTheReport) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const CommandResult result =
      RunCommand({"quantize", "--input", dir / "in", "--output", dir / "out", "--json",
                  dir / "report.json", "--threads", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("model.layers.0.mlp.up_proj"));
  EXPECT_THAT(result.out, HasSubstr("24 x 256"));
  EXPECT_THAT(result.out, HasSubstr("total"));
  EXPECT_THAT(result.err, HasSubstr("quantized 100% of the weights"));
  EXPECT_EQ(result.err.find('\r'), std::string::npos) << "no bar when stderr is no terminal";
  const nlohmann::json report = nlohmann::json::parse(FileBytes(dir / "report.json"));
  EXPECT_EQ(report["layers"][0]["n"], 16);
  EXPECT_EQ(report, nlohmann::json::parse(FileBytes(dir / "out/quantize_report.json")));
}

TEST(QuantizeCommandTest, ExitCodesTellWhatWasWrong) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const std::string in = dir / "in";
  EXPECT_EQ(RunCommand({"quantize", "--input", dir / "nothing", "--output", dir / "out"}).exit_code,
            66);
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", in}).exit_code, 64) << "not empty";
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", dir / "no/such/place"}).exit_code,
            66);
  EXPECT_EQ(
      RunCommand({"quantize", "--input", in, "--output", dir / "o", "--density", "0.5"}).exit_code,
      64);
  EXPECT_EQ(
      RunCommand({"quantize", "--input", in, "--output", dir / "o", "--density", "nan"}).exit_code,
      64);
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", dir / "o", "--group-size", "48"})
                .exit_code,
            64);
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", dir / "o", "--embedding", "int4"})
                .exit_code,
            64);
  EXPECT_FALSE(std::filesystem::exists(dir / "o"));
  std::ofstream(dir / "file") << "in the way";
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", dir / "file"}).exit_code, 64);
  EXPECT_EQ(FileBytes(dir / "file"), "in the way");
}

TEST(InspectCommandTest, ShowsShapesDensityAndTotals) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  ASSERT_EQ(RunCommand({"quantize", "--input", dir / "in", "--output", dir / "out", "--density",
                        "0.02", "--embedding", "int8"})
                .exit_code,
            0);
  const CommandResult result = RunCommand({"inspect", dir / "out", "--verify"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("group size 128, asymmetric, tiles 256 x 128, 32 buckets"));
  EXPECT_THAT(result.out, HasSubstr("24 x 256"));
  EXPECT_THAT(result.out, HasSubstr("model.embed_tokens.weight_scale"));
  EXPECT_THAT(result.out, HasSubstr("2 layers checked, no problem"));
  // 30 and 10 records in 6144 and 2048 weights.
  EXPECT_THAT(result.out, HasSubstr("1.953%"));
}

TEST(InspectCommandTest, AnUnquantizedFolderIsShownToo) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const CommandResult result = RunCommand({"inspect", dir / "in"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("quantization  none"));
}

TEST(InspectCommandTest, VerifyFindsAFlippedByteAnywhereInTheData) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  ASSERT_EQ(RunCommand({"quantize", "--input", dir / "in", "--output", dir / "out"}).exit_code, 0);
  const std::string path = dir / "out/model.safetensors";
  const std::string intact = FileBytes(path);
  for (size_t from_end = 1; from_end < 12000; from_end += 997) {
    std::string damaged = intact;
    damaged[damaged.size() - from_end] ^= 4;
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary) << damaged;
    const CommandResult result = RunCommand({"inspect", dir / "out", "--verify"});
    EXPECT_EQ(result.exit_code, 65) << from_end;
    EXPECT_THAT(result.err, HasSubstr("checksum"));
  }
}

TEST(InspectCommandTest, TileCooFileIsShownAndABrokenOneRefused) {
  std::string good;
  std::string bad;
  for (const auto& entry : std::filesystem::recursive_directory_iterator("tests/data")) {
    const std::string path = entry.path().string();
    if (!path.ends_with(".tcoo")) continue;
    const int code = RunCommand({"inspect", path}).exit_code;
    EXPECT_TRUE(code == 0 || code == 65) << path;
    (code == 0 ? good : bad) = path;
  }
  if (good.empty()) GTEST_SKIP() << "needs .tcoo files below tests/data";
  EXPECT_THAT(RunCommand({"inspect", good}).out, HasSubstr("checksums and every rule hold"));
  EXPECT_FALSE(bad.empty());
}

TEST(InspectCommandTest, MissingFolderAndMissingFileAreNoInput) {
  EXPECT_EQ(RunCommand({"inspect", "/nonexistent/folder"}).exit_code, 66);
  EXPECT_EQ(RunCommand({"inspect", "/nonexistent/file.tcoo"}).exit_code, 66);
}

}  // namespace
}  // namespace flashquant
